"""The layouts for a command on a cluster: from a file, a ConfigMap, or the agents' ConfigMap."""

from mig_manager import errors
from mig_manager.adapters import cluster_reader
from mig_manager.cli.toolkit import console, layout_files
from mig_manager.core.layout import layout_documents


def document(
    terminal: console.Console,
    reader: cluster_reader.ClusterReader,
    *,
    file: str | None,
    config_map: tuple[str, str] | None,
    default: layout_documents.Document | None = None,
    is_lenient: bool = False,
) -> layout_documents.Document:
    """Read the chosen file or ConfigMap, or else the agents', and write its warnings.

    Args:
        terminal: For warnings, and for a file on standard input.
        reader: Reads ConfigMaps.
        file: A layout file, or ``-``.
        config_map: Namespace and name.
        default: The layouts if the agents' ConfigMap does not exist.
        is_lenient: How to parse them.

    Raises:
        ClusterError: A ConfigMap cannot be read.
        ConfigError: The document is invalid.
        UsageError: A file and a ConfigMap are chosen, or no ConfigMap exists.
    """
    if file is not None and config_map is not None:
        raise errors.UsageError("name a file or a ConfigMap with layouts, not both")
    if file is not None:
        read = layout_files.read(terminal, file, is_lenient=is_lenient)
    else:
        read = reader.document(config_map, default, is_lenient=is_lenient)
    for remark in read.warnings:
        terminal.note(f"warning: {remark}")
    return read
