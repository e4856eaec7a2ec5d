"""The images that nodes run: ours from the Dockerfile, NVIDIA's programs on the same base.

No registry is asked. Bases come from Debian packages and are kept in the user's cache.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from tests.realnode import progress
from tests.rigs import programs
from tests.rigs.cluster import deploy_files

AGENT = "localhost/mig-manager:test"
PLUGIN = "localhost/nvidia-device-plugin:test"
PAUSE = "localhost/pause:test"
OPERATOR = "localhost/gpu-operator:test"
NVIDIA_MANAGER = "localhost/k8s-mig-manager:v0.13.1"
_BASE = "localhost/python-base:bookworm"
_PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
_KEPT_S = 24 * 3600.0  # how long unpacked images stay that no cluster has used
_UNPACK = """
root=$1; shift
mount --bind "$root" "$root"
mount -t tmpfs tmpfs /run
# It makes folders in /etc and /var/lib, too.
mount -o remount,bind,ro /
containerd --root "$root" >/run/log 2>&1 &
until ctr version >/dev/null 2>&1; do
    kill -0 $! || { cat /run/log >&2; exit 1; }
    sleep 0.1
done
for archive; do ctr --namespace k8s.io images import "$archive"; done
kill $!
wait $! || true
"""
_CERTIFICATES = pathlib.Path("/etc/ssl/certs/ca-certificates.crt")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Megabytes of an image, unpacked."""

    total_mb: float
    base_mb: float  # of the image that it is built on

    @property
    def own_mb(self) -> float:
        """What our layers add."""
        return self.total_mb - self.base_mb


@dataclasses.dataclass(frozen=True, slots=True)
class MountedImage:
    """A container that does not run yet."""

    root: pathlib.Path
    command: list[str]  # the image's entrypoint and default command
    environ: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Images:
    """Builds images in a store of our own.

    Args:
        cache: Where store and archives lie, also for the next time.
    """

    cache: pathlib.Path

    @functools.cache  # noqa: B019 - a value, and builds nothing twice in a process
    def disk(self, built: pathlib.Path) -> pathlib.Path:
        """Build the images of every node; return containerd's folder after it has unpacked them.

        Both take longer than all else that starts a node.

        Args:
            built: The folder with the programs that go into images.
        """
        every = (PAUSE, PLUGIN, AGENT)
        with self._lock():
            self._build(built)
            identities = "".join(map(self._identity, every))
            disk = self.cache / "disks" / hashlib.sha256(identities.encode()).hexdigest()
            if not disk.exists():
                progress.note("building containerd's folder with the images of a node")
                self._unpack(disk.with_suffix(".part"), every)
                disk.with_suffix(".part").rename(disk)
            disk.touch()
            for other in disk.parent.iterdir():
                if other.stat().st_mtime < disk.stat().st_mtime - _KEPT_S:
                    shutil.rmtree(other)
        return disk

    def agent(self) -> None:
        """Build the image of the agent alone."""
        with self._lock():
            self._build_agent()

    def size(self) -> Size:
        """Return the size of the agent's image, which must be there."""
        return Size(total_mb=self._size_mb(AGENT), base_mb=self._size_mb(_BASE))

    @contextlib.contextmanager
    def mount(self) -> Iterator[MountedImage]:
        """Mount a new container of the agent's image for the body."""
        about = json.loads(self._buildah("inspect", "--type=image", AGENT))["OCIv1"]["config"]
        container = self._buildah("from", "--pull-never", AGENT).strip()
        try:
            root = pathlib.Path(self._buildah("mount", container).strip())
            yield MountedImage(root, [*about["Entrypoint"], *about["Cmd"]], about["Env"])
        finally:
            self._buildah("rm", container)

    def _build(self, built: pathlib.Path) -> None:
        self._build_agent()
        self._with_files(PAUSE, "scratch", [built / "pause"])
        daemons = ("nvidia-device-plugin", "gpu-feature-discovery", "config-manager")
        self._with_files(PLUGIN, _BASE, [built / name for name in daemons], folder="/usr/bin")

    def _build_agent(self) -> None:
        if not self._has(_BASE):
            progress.note("building the base image from Debian packages")
            self._base()
        progress.note("building the agent's image")
        self._buildah(
            "build",
            "--isolation=chroot",
            "--network=host",
            "--layers",
            f"--build-arg=PYTHON_IMAGE={_BASE}",
            f"--tag={AGENT}",
            str(deploy_files.ROOT),
        )

    def _unpack(self, disk: pathlib.Path, every: Sequence[str]) -> None:
        """Have a containerd of its own unpack some images."""
        shutil.rmtree(disk, ignore_errors=True)
        disk.mkdir(parents=True)
        archives = [self._archive(image) for image in every]
        shell = ["unshare", "--mount", "timeout", "300", "sh", "-ec", _UNPACK, "sh"]
        _run(*shell, str(disk), *map(str, archives))
        for archive in archives:
            archive.unlink()

    def operator(self, program: pathlib.Path, module: pathlib.Path) -> pathlib.Path:
        """Build the image of NVIDIA's GPU operator as its Dockerfile has it; return its archive.

        Args:
            program: The operator.
            module: Its source, with the objects that it creates.
        """
        target = "/opt/gpu-operator"
        copied = {"assets": target, "manifests": f"{target}/manifests"}
        recipe = [f"COPY --from=module {source} {to}" for source, to in copied.items()]
        with self._lock():
            self._with_files(
                OPERATOR,
                "scratch",
                [program],
                folder="/usr/bin",
                recipe=["ENV PATH=/usr/bin", *recipe],
                contexts={"module": module},
            )
            return self._archive(OPERATOR)

    def nvidia_manager(self, built: pathlib.Path) -> pathlib.Path:
        """Build the image of NVIDIA's mig-manager as its Dockerfile has it; return its archive.

        Args:
            built: The folder with NVIDIA's programs.
        """
        files = [built / "nvidia-mig-manager", built / "nvidia-mig-parted"]
        recipe = ["ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_MIG_CONFIG_DEVICES=all"]
        with self._lock():
            self._with_files(NVIDIA_MANAGER, _BASE, files, folder="/usr/bin", recipe=recipe)
            return self._archive(NVIDIA_MANAGER)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Keep other processes from building the same."""
        self.cache.mkdir(parents=True, exist_ok=True)
        with (self.cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _base(self) -> None:
        tree = self.cache / "base.tar"
        _run(
            programs.path_or_skip("mmdebstrap"),
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

    def _with_files(
        self,
        image: str,
        base: str,
        files: Sequence[pathlib.Path],
        *,
        folder: str = "",
        recipe: Sequence[str] = (),
        contexts: Mapping[str, pathlib.Path] | None = None,
    ) -> None:
        """Build an image that starts the first of some programs.

        Args:
            image: Its name.
            base: The image below it.
            files: The programs, of one folder.
            folder: Where they are in the image.
            recipe: Further lines of the Containerfile.
            contexts: Folders that those lines name.
        """
        lines = [f"FROM {base}", *(f"COPY {file.name} {folder}/" for file in files), *recipe]
        lines += [f'ENTRYPOINT ["{folder}/{files[0].name}"]', ""]
        written = self.cache / "Containerfile"
        written.write_text("\n".join(lines))
        self._buildah(
            "build",
            "--layers",
            *(f"--build-context={name}={path}" for name, path in (contexts or {}).items()),
            f"--file={written}",
            f"--tag={image}",
            str(files[0].parent),
        )

    def _archive(self, image: str) -> pathlib.Path:
        """Write an image to a file, named by what it holds."""
        archive = self.cache / f"{self._identity(image)}.tar"
        if not archive.exists():
            part = archive.with_suffix(".part")
            part.unlink(missing_ok=True)
            self._buildah("push", image, f"docker-archive:{part}:{image}")
            part.rename(archive)
        return archive

    def _identity(self, image: str) -> str:
        output = self._buildah("images", "--quiet", "--no-trunc", image)
        return output.strip().rpartition(":")[2]

    def _size_mb(self, image: str) -> float:
        number, unit = self._buildah("images", "--format={{.Size}}", image).split()
        return float(number) * {"MB": 1, "GB": 1000}[unit]

    def _has(self, image: str) -> bool:
        return bool(self._buildah("images", "--quiet", "--filter", f"reference={image}"))

    def _buildah(self, *arguments: str) -> str:
        store = [f"--root={self.cache / 'store'}", f"--runroot={self.cache / 'run'}"]
        return _run(programs.path_or_skip("buildah"), *store, *arguments, BUILDAH_LAYERS="true")


def _run(*line: str, **environ: str) -> str:
    done = subprocess.run(
        line, capture_output=True, text=True, check=False, env={**os.environ, **environ}
    )
    if done.returncode:
        raise RuntimeError(f"{line}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout
