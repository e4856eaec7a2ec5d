"""What is known of whether layouts fit products, or the GPUs of a node."""

import dataclasses

from mig_manager.catalogue import hardware
from mig_manager.core.layout import layout_fit, layout_parser
from tests.rigs import layout_table

A100 = hardware.template(hardware.find("A100-SXM4-40GB"))
LAYOUT = layout_parser.parse(layout_table.document(["all-balanced"]), source="f").layout(
    "all-balanced"
)


def test_products_that_share_a_name_are_reported_apart() -> None:
    templates = [hardware.template(product) for product in hardware.match("h100-*gb")]
    assert len({template.name for template in templates}) < len(templates)

    result = layout_fit.against_products([LAYOUT], source="f", templates=templates)

    assert len(result.product_fits) == len(templates)


def test_facts_that_need_mig_mode_are_unknown_before_it_is_on() -> None:
    gpu = dataclasses.replace(A100, profiles=None)

    result = layout_fit.against_node([LAYOUT], source="f", gpus=[gpu])

    assert result.product_fits["all-balanced", A100.name].fit is layout_fit.Fit.UNKNOWN
    assert not result.misfits
