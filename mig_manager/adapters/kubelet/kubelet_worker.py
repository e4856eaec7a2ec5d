"""The kubelet worker: a process that asks kubelet for an agent that does without gRPC.

The composition root of the child behind ``adapters.podresources_child``. It ends with whoever
asks, or when no question has come for a while.
"""

import json
import select
import sys
from collections.abc import Sequence

from mig_manager.adapters.kubelet import pod_resources, podresources_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Answer the questions on stdin, a line each.

    Args:
        argv: The socket, seconds for a question, and seconds to wait for the next one; None takes
            the arguments of the process.
    """
    path, timeout_s, linger_s = sys.argv[1:] if argv is None else argv
    kubelet = pod_resources.PodResources(path, timeout_s=float(timeout_s))
    # Whoever started us ahead asks only later.
    kubelet.warm_up()
    # One question at a time, so that nothing is left in a buffer when we wait for the next.
    questions = select.poll()
    questions.register(sys.stdin.fileno(), select.POLLIN)
    while questions.poll(float(linger_s) * 1000):
        question = sys.stdin.readline()
        if not question:
            break
        answer = podresources_lines.answer(question.strip(), kubelet)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
