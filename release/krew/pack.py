#!/usr/bin/env python3
"""Packs the plugin for krew: one file that Python runs, in an archive, and krew's manifest.

    PYTHON release/krew/pack.py FOLDER

PYTHON is that of an environment with the program and what it needs; what is packed is what the
plugin imports and nothing else, all of it Python source. The variable PROJECT_URL is the address
of the repository, whose release will have the archive. The same files give the same bytes.
"""

import gzip
import hashlib
import importlib.metadata
import importlib.util
import io
import modulefinder
import os
import pathlib
import string
import sys
import tarfile
import time
import zipfile

from mig_manager.kubectl import plugin_registry

KREW_FOLDER = pathlib.Path(__file__).parent
ENTRY = "mig_manager.kubectl.__main__"
PLACEHOLDER = "https://example.com/OWNER/mig-manager"
"""For a manifest that is installed with ``--archive``, which krew reads without any address."""
DATA = {
    "mig_manager.catalogue.product_table": "hardware.json"
}  # what a module reads beside itself
DISPENSABLE = frozenset({"yaml._yaml"})  # modules of machine code that their packages do without
UNUSED = ("structlog",)
"""Imported late by modules that the plugin loads, where a log is configured; it has none."""
MAIN = """\
import sys

if sys.version_info < (3, 11):
    sys.exit("kubectl-mig needs Python 3.11 or newer; this is %d.%d" % sys.version_info[:2])

from mig_manager.kubectl import __main__

__main__.main()
"""
"""In syntax of the oldest Python 3."""
_FIRST_ZIP_TIME = 315532800  # 1980: the earliest time in a ZIP archive


def main() -> None:
    """Pack into the folder given."""
    folder = pathlib.Path(sys.argv[1])
    version = importlib.metadata.version("mig-manager")
    environ = os.environ  # noqa: TID251 - a script
    homepage = (environ.get("PROJECT_URL") or PLACEHOLDER).rstrip("/")
    epoch = int(environ.get("SOURCE_DATE_EPOCH") or _FIRST_ZIP_TIME)
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"kubectl-mig-{version}.tar.gz"
    archive.write_bytes(pack_files({"kubectl-mig": program(epoch), **licences()}, epoch))
    template = string.Template((KREW_FOLDER / "mig.yaml.template").read_text(encoding="utf-8"))
    manifest = template.substitute(
        version=version,
        homepage=homepage,
        url=f"{homepage}/releases/download/v{version}",
        archive=archive.name,
        sha256=hashlib.sha256(archive.read_bytes()).hexdigest(),
    )
    (folder / "mig.yaml").write_text(manifest, encoding="utf-8")


def program(epoch: int) -> bytes:
    """Return the plugin as one executable file: a line that names Python, and a ZIP archive."""
    content = {"__main__.py": MAIN.encode(), **sources()}
    written = io.BytesIO()
    written.write(b"#!/usr/bin/env python3\n")
    moment = time.gmtime(max(epoch, _FIRST_ZIP_TIME))[:6]
    with zipfile.ZipFile(written, "a", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(content.items()):
            entry = zipfile.ZipInfo(name, moment)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return written.getvalue()


def sources() -> dict[str, bytes]:
    """Return what the plugin imports, also what it imports late, by path within the archive.

    Raises:
        SystemExit: It imports machine code, which cannot be packed.
    """
    spec = importlib.util.find_spec("mig_manager")
    repository = pathlib.Path(str(spec and spec.origin)).parents[1]
    # Without the standard library's folder, so that only what must be packed is found.
    path = [str(repository), *(each for each in sys.path if each.endswith("-packages"))]
    finder = modulefinder.ModuleFinder(path=path, excludes=UNUSED)
    finder.import_hook(ENTRY)
    # The registry names the commands' modules, and does not import them.
    for row in filter(lambda row: row.module, plugin_registry.PROGRAM.rows):
        finder.import_hook(f"{plugin_registry.PROGRAM.folder}.{row.module}")
    texts: dict[str, bytes] = {}
    for name, module in finder.modules.items():
        if name in sys.builtin_module_names:
            continue
        path = pathlib.Path(module.__file__ or "")
        if path.suffix != ".py":
            if name in DISPENSABLE:
                continue
            sys.exit(f"{name} is no Python source, and cannot be packed: {path}")
        within = name.replace(".", "/") + ("/__init__.py" if module.__path__ else ".py")
        texts[within] = path.read_bytes()
        if name in DATA:
            beside = pathlib.PurePosixPath(within).with_name(DATA[name])
            texts[str(beside)] = path.with_name(DATA[name]).read_bytes()
    return texts


def licences() -> dict[str, bytes]:
    """Return the licences of what is packed."""
    texts = {"LICENSE": (KREW_FOLDER.parents[1] / "LICENSE").read_bytes()}
    for path in importlib.metadata.files("PyYAML") or ():
        if path.name == "LICENSE":
            texts["LICENSE-PyYAML"] = path.read_binary()
    return texts


def pack_files(files: dict[str, bytes], epoch: int) -> bytes:
    """Return files as an archive."""
    tarred = io.BytesIO()
    with tarfile.open(fileobj=tarred, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), epoch
            member.mode = 0o755 if name == "kubectl-mig" else 0o644
            archive.addfile(member, io.BytesIO(data))
    return gzip.compress(tarred.getvalue(), mtime=epoch)


if __name__ == "__main__":
    main()
