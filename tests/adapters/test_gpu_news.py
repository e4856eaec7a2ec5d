"""The lines between the GPU listener and the agent."""

import pytest

from mig_manager import errors
from mig_manager.adapters.nvml_worker import gpu_news


@pytest.mark.parametrize(
    "news",
    [
        gpu_news.Watching(gpus=7, of=8),
        gpu_news.Changed(gpus=("GPU-1", "GPU-2")),
        gpu_news.Failed(reason=errors.Reason.NOT_SUPPORTED, message="GPU 0:\nnone of it"),
    ],
)
def test_news_come_out_of_a_line_as_they_went_in(news: gpu_news.News) -> None:
    line = gpu_news.encode(news)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert gpu_news.decode(line) == news


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"NVRM: hello",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"watching": "8", "of": 8}',
        b'{"changed": "GPU-1"}',
        b'{"failed": "so", "reason": "Whatever"}',
        b'{"failed": "so", "reason": []}',
    ],
)
def test_a_line_that_makes_no_sense_is_a_failure_that_quotes_it(line: bytes) -> None:
    told = gpu_news.decode(line)
    assert isinstance(told, gpu_news.Failed)
    assert told.reason is errors.Reason.INTERNAL
    assert repr(line) in told.message
