"""Documents of one layout, written as rules in flow style."""

from mig_manager.core import model
from mig_manager.core.files import yaml_text, yaml_tree
from mig_manager.core.layout import layout_documents, layout_parser, layouts
from tests.rigs import contract

DISABLED = model.MigMode.DISABLED


def parse(text: str) -> layout_documents.Document:
    """Parse what a lenient reader takes without a warning too."""
    document = layout_parser.parse(text, source="f.yaml")
    lenient = layout_parser.parse(text, source="f.yaml", is_lenient=True)
    assert lenient == document
    assert lenient.warnings == ()
    contract.check("LayoutFile", yaml_tree.plain(yaml_text.parse(text, source="f.yaml")))
    return document


def of_rules(*rules: str) -> str:
    """A document whose layout ``x`` has these rules, in flow style."""
    return "version: v1\nmig-configs:\n  x:\n" + "".join(f"  - {{{rule}}}\n" for rule in rules)


def layout_of(*rules: str) -> layouts.Layout:
    return parse(of_rules(*rules)).layout("x")


def of_mig_devices(devices: str) -> str:
    return of_rules(f"devices: all, mig-enabled: true, mig-devices: {devices}")
