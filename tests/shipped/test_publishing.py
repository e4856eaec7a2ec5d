"""What a release runs beside its build: its notes, files, chart, image, and the project's URLs."""

import email
import hashlib
import json
import os
import pathlib
import re
import shutil
import sys
import tarfile
import zipfile

import pytest

import mig_manager
from tests.rigs import programs
from tests.shipped import building

ROOT = pathlib.Path(__file__).parents[2]
RELEASE = ROOT / "release"
VERSION = mig_manager.__version__
ADDRESS = "https://example.com/owner/fork"
DIGEST = f"sha256:{'ab' * 32}"


# -- the tag and the notes --------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    """A repository whose changelog has a release of this version."""
    (tmp_path / "release").mkdir()
    shutil.copy(RELEASE / "notes.py", tmp_path / "release")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    text = f"# Changelog\n\n## Unreleased\n\nNext.\n\n## {VERSION} - 2026-11-23\n\nThis one.\n\n"
    (tmp_path / "CHANGELOG.md").write_text(f"{text}## 0.0.1 - 2026-01-01\n\nThe last.\n")
    return tmp_path


def test_the_notes_of_a_tag_are_its_section_of_the_changelog(checkout: pathlib.Path) -> None:
    notes = checkout / "release" / "notes.py"

    assert programs.output(sys.executable, notes, f"v{VERSION}") == "This one.\n"
    assert programs.output(sys.executable, notes) == "Next.\n"
    assert programs.output(sys.executable, RELEASE / "notes.py")


def test_rehearsal_of_a_release_commit_has_its_notes(checkout: pathlib.Path) -> None:
    changelog = checkout / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("Next.\n\n", ""))

    output = programs.output(sys.executable, checkout / "release" / "notes.py")

    assert output == "This one.\n"


@pytest.mark.parametrize("tag", [VERSION, f"v{VERSION}.1", f"v{VERSION}-rc1", "v", "latest"])
def test_a_tag_of_another_version_is_refused(checkout: pathlib.Path, tag: str) -> None:
    done = programs.run(sys.executable, checkout / "release" / "notes.py", tag)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"The tag {tag} is not of version {VERSION}")


def test_a_version_that_the_changelog_does_not_describe_is_refused(checkout: pathlib.Path) -> None:
    changelog = checkout / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("This one.\n", ""))

    done = programs.run(sys.executable, checkout / "release" / "notes.py", f"v{VERSION}")

    assert done.returncode == 1
    assert f"## {VERSION} - YYYY-MM-DD" in done.stderr


# -- the files --------------------------------------------------------------------------------


def test_sha256sum_accepts_the_checksums_of_all_files(tmp_path: pathlib.Path) -> None:
    dist, assets = tmp_path / "dist", tmp_path / "assets"
    (dist / "krew").mkdir(parents=True)
    names = {"a.whl", "b b.deb", "krew/mig.yaml"}
    for name in names:
        (dist / name).write_text(name)

    programs.output(RELEASE / "assets", dist, assets)

    lines = (assets / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    assert sums == {
        pathlib.Path(name).name: hashlib.sha256(name.encode()).hexdigest() for name in names
    }
    assert {each.name for each in assets.iterdir()} == {*sums, "SHA256SUMS"}
    programs.output("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=assets)


def test_files_that_a_page_cannot_have_side_by_side_are_refused(tmp_path: pathlib.Path) -> None:
    dist = tmp_path / "dist"
    for name in ("mig.yaml", "krew/mig.yaml"):
        (dist / name).parent.mkdir(parents=True, exist_ok=True)
        (dist / name).write_text(name)

    done = programs.run(RELEASE / "assets", dist, tmp_path / "assets")
    again = programs.run(RELEASE / "assets", dist, tmp_path / "assets")
    (tmp_path / "empty").mkdir()
    empty = programs.run(RELEASE / "assets", tmp_path / "empty", tmp_path / "other")

    assert (done.returncode, done.stderr) == (1, "two files are named mig.yaml\n")
    assert again.returncode == 1
    assert "exists already" in again.stderr
    assert empty.returncode == 1
    assert not (tmp_path / "other" / "SHA256SUMS").exists()


# -- the chart --------------------------------------------------------------------------------


def test_packed_chart_is_reproducible_and_has_the_image(tmp_path: pathlib.Path) -> None:
    programs.path_or_skip("kubectl")
    image = "registry.example.com/owner/mig-manager"
    for folder in ("one", "two"):
        command = (RELEASE / "chart", tmp_path / folder, image)
        programs.output(*command, PROJECT_URL=ADDRESS, SOURCE_DATE_EPOCH="1700000000")

    name = f"mig-manager-{VERSION}.tgz"
    packed = tmp_path / "one" / name
    assert packed.read_bytes() == (tmp_path / "two" / name).read_bytes()
    with tarfile.open(packed) as archive:
        assert {(each.mtime, each.uid, each.gid) for each in archive} == {(1700000000, 0, 0)}
    helm = programs.path_or_skip("helm")
    rendered = programs.output(
        helm, "template", "mig", packed, "--kube-version=1.34.0", cwd=tmp_path
    )
    assert re.findall(r"image: (\S+)", rendered) == [f"{image}:{VERSION}"]
    about = programs.output(helm, "show", "chart", packed, cwd=tmp_path)
    assert f"home: {ADDRESS}\n" in about
    assert f"sources:\n- {ADDRESS}\n" in about


# -- the image --------------------------------------------------------------------------------


STAND_IN = """#!/bin/sh
echo "${{0##*/}} $*" >>log
case "$*" in
*imagetools*) echo {digest} ;;
buildx*) tar -cf image.tar index.json ;;
esac
"""
"""Notes what docker, skopeo and git are asked; answers and builds as BuildKit does."""


def test_image_is_attested_and_pushed_as_tested(tmp_path: pathlib.Path) -> None:
    shutil.copytree(RELEASE, tmp_path / "release")
    for name in ("Dockerfile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "index.json").write_text(json.dumps({"manifests": [{"digest": DIGEST}]}))
    for name in ("docker", "skopeo", "git"):
        (tmp_path / name).write_text(STAND_IN.format(digest=DIGEST))
        (tmp_path / name).chmod(0o755)
    file, repository = tmp_path / "image.tar", "registry.example.com/owner/mig-manager"
    image, path = tmp_path / "release" / "image", f"{tmp_path}:{os.environ['PATH']}"

    for arguments in (("build", file), ("test", file), ("push", file, repository)):
        output = programs.output(image, *arguments, cwd=tmp_path, PATH=path, PROJECT_URL=ADDRESS)
        assert output == f"{DIGEST}\n"

    log = (tmp_path / "log").read_text()
    assert re.search(rf" PYTHON_IMAGE=python:3\.\d+-slim@{DIGEST} ", log)
    for words in (
        "--platform linux/amd64,linux/arm64",
        f"--provenance=mode=max --sbom=true --output type=oci,dest={file},rewrite-timestamp=true",
        f"--label org.opencontainers.image.source={ADDRESS}",
        f"skopeo copy --quiet oci-archive:{file} docker-daemon:mig-manager:tested",
        f"--all --preserve-digests oci-archive:{file} docker://{repository}:{VERSION}\n",
    ):
        assert words in log


# -- the project's URLs -----------------------------------------------------------------------


def urls(wheel: pathlib.Path) -> list[str]:
    """Return the project's URLs in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/METADATA"))
        return email.message_from_bytes(archive.read(name)).get_all("Project-URL", [])


@pytest.mark.slow
def test_a_wheel_built_without_an_address_names_none(wheel: pathlib.Path) -> None:
    assert urls(wheel) == []


@pytest.mark.slow
def test_wheel_has_the_urls_of_its_source_archive(tmp_path: pathlib.Path) -> None:
    archive = building.build(ROOT, "sdist", tmp_path / "sdist", PROJECT_URL=f"{ADDRESS}/")
    (source,) = programs.unpack(archive, tmp_path / "unpacked").iterdir()

    plain = building.build(source, "wheel", tmp_path / "plain")
    elsewhere = {"PROJECT_URL": "https://example.com/else/where"}
    moved = building.build(source, "wheel", tmp_path / "moved", **elsewhere)

    assert urls(plain) == [
        f"Source, {ADDRESS}",
        f"Documentation, {ADDRESS}/tree/v{VERSION}/docs",
        f"Changelog, {ADDRESS}/blob/v{VERSION}/CHANGELOG.md",
        f"Issues, {ADDRESS}/issues",
        f"Releases, {ADDRESS}/releases",
    ]
    assert moved.read_bytes() == plain.read_bytes()


@pytest.mark.parametrize("address", ["example.com/a/b", "http://example.com/a", "https://a.b"])
def test_an_invalid_repository_address_ends_the_build(
    address: str, tmp_path: pathlib.Path
) -> None:
    command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path)

    done = programs.run(*command, cwd=ROOT, PROJECT_URL=address)

    assert done.returncode != 0
    assert "PROJECT_URL must be https://HOST/OWNER/REPOSITORY" in done.stderr
    assert list(tmp_path.iterdir()) == []
