"""scripts/setup.sh, with a Python that only notes what it is asked for."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Plays python3, its venv and its pip; FAKE_* variables say how.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
*"print("*) echo "${FAKE_VERSION-3.11.7}" ;;
*"import ensurepip, venv"*) [[ -z ${FAKE_NO_VENV:-} ]] ;;
"-") cat >/dev/null; [[ -n ${FAKE_TORCH:-} ]] ;;
"-m pip --version") ;;
"-m venv "*)
    echo "$*" >>"$FAKE_CALLS"
    mkdir -p "${!#}/bin"
    cp "$0" "${!#}/bin/python"
    ;;
"-m pip install "*)
    all=$*
    echo "${all#*version-check }" >>"$FAKE_CALLS"
    [[ -z ${FAKE_FAIL:-} || $* != *"$FAKE_FAIL"* ]] || { echo "ERROR: No matching distribution" && exit 1; }
    ;;
esac
"""


class Clone:
    """A copy of what setup.sh reads, in a folder whose name has a space."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "a clone"
        (self.root / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "setup.sh", self.root / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.venv = self.root / ".venv"
        self.python = self.put_command("python3", FAKE_PYTHON)
        for version in ("3.10", "3.11", "3.12", "3.13"):  # no real one may be found
            self.put_command(f"python{version}", "#!/bin/sh\nexit 127\n")
        self.put_command("uname", '#!/bin/sh\necho "Linux ${FAKE_MACHINE-x86_64}"\n')
        self._calls = tmp_path / "calls"

    def put_command(self, name: str, script: str) -> Path:
        """A command on PATH."""
        path = self.root.parent / name
        path.write_text(script)
        path.chmod(0o755)
        return path

    def setup(self, *extras: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run it from elsewhere; the fake Python is the first on PATH."""
        self._calls.write_text("")
        own = {"FAKE_CALLS": str(self._calls), "PATH": f"{self.python.parent}:{os.environ['PATH']}"}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SURFACE_FUSION_")}
        return subprocess.run(
            [self.root / "scripts" / "setup.sh", *extras],
            cwd=self.python.parent,
            env=inherited | own | variables,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    @property
    def calls(self) -> list[str]:
        """What the last set-up asked of the fake Python."""
        return self._calls.read_text().splitlines()


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_torch_is_installed_before_the_package_and_the_environment_is_told(clone: Clone) -> None:
    done = clone.setup("plot", "test")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{clone.venv}\n"
    assert clone.calls == [f"-m venv {clone.venv}", "torch==2.13.0", "-e .[plot,test]"]


def test_a_second_run_does_nothing(clone: Clone) -> None:
    first = clone.setup("plot")
    again = clone.setup("plot")
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")
    assert clone.calls == []


def test_extras_add_up(clone: Clone) -> None:
    clone.setup("test")
    clone.setup("plot")
    assert clone.calls == ["torch==2.13.0", "-e .[plot,test]"]
    clone.setup()
    assert clone.calls == []


def test_a_changed_pyproject_is_installed_again(clone: Clone) -> None:
    clone.setup("plot")
    with (clone.root / "pyproject.toml").open("a") as pyproject:
        pyproject.write("# changed\n")
    clone.setup("plot")
    assert clone.calls[-1] == "-e .[plot]"


def test_failed_install_is_one_line_and_leaves_no_stamp(clone: Clone) -> None:
    failed = clone.setup("plot", FAKE_FAIL="-e .[plot]")
    assert failed.returncode == 1
    assert failed.stdout == ""
    log = clone.venv / "surface-fusion-setup.log"
    assert failed.stderr.splitlines()[-2:] == [
        "ERROR: No matching distribution",
        f"setup: pip install -e .[plot] failed, see above and {log}",
    ]
    assert clone.setup("plot").returncode == 0
    assert clone.calls[-1] == "-e .[plot]"


def test_torch_of_the_machine_is_kept(clone: Clone) -> None:
    done = clone.setup(FAKE_TORCH="yes")
    assert clone.calls == [f"-m venv --system-site-packages {clone.venv}", "-e ."]
    assert "keeping its torch" in done.stderr


def test_another_torch_can_be_chosen(clone: Clone) -> None:
    clone.setup(FAKE_TORCH="yes", SURFACE_FUSION_TORCH="torch==2.9.1 --pre")
    assert clone.calls == [f"-m venv {clone.venv}", "torch==2.9.1 --pre", "torch==2.9.1 --pre -e ."]


@pytest.mark.parametrize(
    ("version", "machine"), [("3.10.13", "x86_64"), ("3.13.0", "x86_64"), ("3.11.7", "aarch64")]
)
def test_fairseq_is_compiled_where_it_has_no_wheel(clone: Clone, version: str, machine: str) -> None:
    done = clone.setup(FAKE_VERSION=version, FAKE_MACHINE=machine)
    assert done.returncode == 0, done.stderr
    assert clone.calls[1:] == [
        "torch==2.13.0",
        "numpy cython setuptools>=77 wheel",
        "--no-build-isolation --no-deps fairseq-fixed==0.12.3.1",
        "-e .",
    ]


@pytest.mark.parametrize("version", ["2.7.18", "3.9.18", "3.14.1"])
def test_unsupported_python_is_named(clone: Clone, version: str) -> None:
    done = clone.setup(FAKE_VERSION=version, SURFACE_FUSION_PYTHON=str(clone.python))
    assert done.returncode == 1
    assert done.stderr == (
        f"setup: SURFACE_FUSION_PYTHON is Python {version}; supported: "
        "3.11 and 3.12 (Linux x86_64: wheels only), 3.10 and 3.13 (and other machines: with a C++ compiler)\n"
    )


def test_no_supported_python_on_the_path_is_an_error(clone: Clone) -> None:
    done = clone.setup(FAKE_VERSION="3.9.18")
    assert done.returncode == 1
    assert "no supported Python on PATH (found: Python 3.9.18)" in done.stderr
    assert clone.calls == []


def test_a_python_with_wheels_is_preferred(clone: Clone) -> None:
    clone.put_command("python3.12", FAKE_PYTHON.replace("${FAKE_VERSION-3.11.7}", "3.12.1"))
    done = clone.setup(FAKE_VERSION="3.13.0")
    assert "with Python 3.12.1" in done.stderr


def test_a_missing_venv_module_is_named(clone: Clone) -> None:
    done = clone.setup(FAKE_NO_VENV="yes")
    assert done.returncode == 1
    assert done.stderr == (
        "setup: Python 3.11.7 (python3) cannot create virtual environments: it lacks venv or ensurepip "
        "(Debian, Ubuntu: apt-get install python3-venv)\n"
    )


def test_another_python_than_that_of_the_environment_is_refused(clone: Clone) -> None:
    clone.setup()
    other = clone.put_command("other", "#!/bin/sh\necho 3.12.1\n")
    done = clone.setup(SURFACE_FUSION_PYTHON=str(other))
    assert done.returncode == 1
    assert f"{clone.venv} has Python 3.11.7 but SURFACE_FUSION_PYTHON is 3.12.1" in done.stderr


def test_a_broken_environment_is_named(clone: Clone) -> None:
    (clone.venv / "bin").mkdir(parents=True)
    (clone.venv / "bin" / "python").symlink_to("/nowhere/python3.11")
    done = clone.setup()
    assert done.returncode == 1
    assert f"the Python of {clone.venv} does not run" in done.stderr


def test_a_moved_clone_is_refused(clone: Clone) -> None:
    clone.setup()
    old = clone.root
    clone.root = old.rename(old.with_name("moved"))
    done = clone.setup()
    assert done.returncode == 1
    assert f"was set up under another path ({old}, {old}/.venv)" in done.stderr


def test_the_environment_may_have_a_relative_path(clone: Clone, tmp_path: Path) -> None:
    done = clone.setup(SURFACE_FUSION_VENV="env")
    assert done.stdout == f"{tmp_path / 'env'}\n"
    assert (tmp_path / "env" / "bin" / "python").exists()


def test_an_unknown_extra_is_refused(clone: Clone) -> None:
    done = clone.setup("plots")
    line = "setup: there is no extra 'plots'; choose from bpe, docs, plot, test\n"
    assert (done.returncode, done.stderr) == (1, line)
