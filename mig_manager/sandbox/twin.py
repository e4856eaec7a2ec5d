"""The products of captured GPUs under the simulated driver, surveyed in the same way."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mig_manager.adapters.nvml import worker_client
from mig_manager.catalogue import hardware, product_table
from mig_manager.core import model
from mig_manager.core.acceptance import surveys
from mig_manager.sandbox.driver import (
    simulated_worker,
    state_file,
    states,
    transitions,
)

if TYPE_CHECKING:
    from mig_manager.core.answers import captures


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """The answers of the simulated driver."""

    gpus: "tuple[captures.CapturedGpu | None, ...]"
    """The expected capture of each GPU; None: no product is like it, or it cannot be simulated."""
    library: dict[str, list[str]]  # the answers of functions that concern no GPU
    products: tuple[product_table.Product | None, ...]

    def instance_ids(self, number: int, placement: model.Placement) -> frozenset[int]:
        """Return the ids that a GPU instance at a placement can have, on boards of both kinds."""
        product = self.products[number]
        if product is None or not product.profiles:
            return frozenset()
        return frozenset(
            transitions.gpu_instance_id(product, placement, is_swapped=is_swapped)
            for is_swapped in (False, True)
        )


def of(captured: "Sequence[captures.CapturedGpu]", *, timeout_s: float) -> Twin:
    """Survey simulated GPUs of the same products, in the same MIG modes.

    Raises:
        HardwareError: The worker failed, or did not answer in time.
    """
    products = tuple(
        hardware.of_gpu(int(gpu["pci_device_id"], 16), gpu["name"], gpu["memory_mib"])
        for gpu in captured
    )
    simulatable = [
        (number, product)
        for number, product in enumerate(products)
        if product is not None and not product.not_simulatable
    ]
    # Without a product any GPU shows what the library answers.
    simulated = [product for _, product in simulatable] or [hardware.find("A100")]
    survey = _survey(
        simulated, [captured[number] for number, _ in simulatable], timeout_s=timeout_s
    )
    gpus: list[captures.CapturedGpu | None] = [None] * len(captured)
    if simulatable:
        for (number, product), gpu in zip(simulatable, surveys.capture(survey), strict=True):
            rows = {row.enum_index: row.compute for row in product.profiles}
            gpus[number] = surveys.with_compute_profiles(gpu, rows)
    return Twin(gpus=tuple(gpus), library=surveys.answers_of(survey.calls), products=products)


def _survey(
    products: Sequence[product_table.Product],
    captured: "Sequence[captures.CapturedGpu]",
    *,
    timeout_s: float,
) -> surveys.Survey:
    with tempfile.TemporaryDirectory(prefix="mig-manager-") as folder:
        path = pathlib.Path(folder) / "node.json"
        virtualization = next((gpu["virtualization"] for gpu in captured), "none")
        options = states.Options(virtualization=model.Virtualization(virtualization))
        state = state_file.SharedState(path)
        state.create("+".join(product.key for product in products), options)
        state.update(lambda node: _in_modes(node, captured))
        command = worker_client.worker_command(program=simulated_worker.program(path))
        return worker_client.WorkerGpus(command=command, timeout_s=timeout_s).survey()


def _in_modes(
    node: states.MachineState, captured: "Iterable[captures.CapturedGpu]"
) -> states.MachineState:
    on = model.MigMode.ENABLED.value
    for index, gpu in enumerate(captured):
        is_on, is_pending = gpu["mig_mode"] == on, gpu["pending_mig_mode"] == on
        now = dataclasses.replace(node.gpus[index], is_enabled=is_on, is_pending=is_pending)
        node = node.with_gpu(index, now)
    return node
