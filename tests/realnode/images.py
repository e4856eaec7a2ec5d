"""The images that nodes run: ours from the Dockerfile, NVIDIA's programs on the same base.

No registry is asked. Bases come from Debian packages and are kept in the user's cache.
"""

import dataclasses
import fcntl
import os
import pathlib
import subprocess
from collections.abc import Sequence

from tests import programs
from tests.cluster import clusters

AGENT = "localhost/mig-manager:test"
PLUGIN = "localhost/nvidia-device-plugin:test"
PAUSE = "localhost/pause:test"
_BASE = "localhost/python-base:bookworm"
_PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
_CERTIFICATES = pathlib.Path("/etc/ssl/certs/ca-certificates.crt")


@dataclasses.dataclass(frozen=True, slots=True)
class Images:
    """Builds images in a store of our own.

    Args:
        cache: Where store and archives lie, also for the next time.
    """

    cache: pathlib.Path

    def build(self, built: pathlib.Path) -> list[pathlib.Path]:
        """Build all images; return their archives.

        Args:
            built: The folder with the programs that go into images.
        """
        self.cache.mkdir(parents=True, exist_ok=True)
        with (self.cache / "lock").open("w") as lock:
            # Another process would build the same.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._has(_BASE):
                self._base()
            self._buildah(
                "build",
                "--isolation=chroot",
                "--network=host",
                "--layers",
                f"--build-arg=PYTHON_IMAGE={_BASE}",
                f"--tag={AGENT}",
                str(clusters.ROOT),
            )
            self._with_files(PAUSE, "scratch", [built / "pause"])
            daemons = [built / "nvidia-device-plugin", built / "gpu-feature-discovery"]
            self._with_files(PLUGIN, _BASE, daemons)
            return [self._archive(image) for image in (PAUSE, PLUGIN, AGENT)]

    def _base(self) -> None:
        tree = self.cache / "base.tar"
        _run(
            programs.needed("mmdebstrap"),
            "--variant=apt",
            "--mode=root",
            "--quiet",
            f"--include={_PACKAGES}",
            *(f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in ("doc", "locale", "man")),
            "bookworm",
            str(tree),
        )
        container = self._buildah("from", "scratch").strip()
        root = pathlib.Path(self._buildah("mount", container).strip())
        _run("tar", "--directory", str(root), "--extract", "--file", str(tree))
        tree.unlink()
        local = root / "usr/local"
        for name in ("python", "python3"):
            (local / "bin" / name).symlink_to("/usr/bin/python3")
        # The Dockerfile compiles the library of the official images, which lies there.
        (local / "lib/python3").mkdir()
        # Those of a proxy that this machine trusts, too.
        (root / "etc/ssl/certs/ca-certificates.crt").write_bytes(_CERTIFICATES.read_bytes())
        self._buildah("umount", container)
        self._buildah(
            "config",
            "--env=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            f"--env=PIP_CERT={_CERTIFICATES}",
            f"--env=SSL_CERT_FILE={_CERTIFICATES}",
            container,
        )
        self._buildah("commit", "--rm", container, _BASE)

    def _with_files(self, image: str, base: str, files: Sequence[pathlib.Path]) -> None:
        """Build an image that starts the first of some programs."""
        lines = [f"FROM {base}", *(f"COPY {file.name} /" for file in files)]
        lines += [f'ENTRYPOINT ["/{files[0].name}"]', ""]
        recipe = self.cache / "Containerfile"
        recipe.write_text("\n".join(lines))
        self._buildah(
            "build", "--layers", f"--file={recipe}", f"--tag={image}", str(files[0].parent)
        )

    def _archive(self, image: str) -> pathlib.Path:
        """Write an image to a file, named by what it holds."""
        identity = self._buildah("images", "--quiet", "--no-trunc", image).strip()
        archive = self.cache / f"{identity.rpartition(':')[2]}.tar"
        if not archive.exists():
            part = archive.with_suffix(".part")
            part.unlink(missing_ok=True)
            self._buildah("push", image, f"docker-archive:{part}:{image}")
            part.rename(archive)
        return archive

    def _has(self, image: str) -> bool:
        return bool(self._buildah("images", "--quiet", "--filter", f"reference={image}"))

    def _buildah(self, *arguments: str) -> str:
        store = [f"--root={self.cache / 'store'}", f"--runroot={self.cache / 'run'}"]
        return _run(programs.needed("buildah"), *store, *arguments, BUILDAH_LAYERS="true")


def _run(*line: str, **environ: str) -> str:
    done = subprocess.run(
        line, capture_output=True, text=True, check=False, env={**os.environ, **environ}
    )
    if done.returncode:
        raise RuntimeError(f"{line}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout
