"""The core tests on the other Python versions that Roost supports, in environments of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BOOTSTRAP = ROOT / "script" / "bootstrap"
(VERSIONS,) = re.findall(r'^supported="(.*)"$', BOOTSTRAP.read_text(), re.MULTILINE)
THIS = f"{sys.version_info.major}.{sys.version_info.minor}"
NOT_INSTALLED = 3


@pytest.mark.full
@pytest.mark.parametrize("version", sorted({*VERSIONS.split()} - {THIS}))
def test_core_tests_pass_on(version: str) -> None:
    # Variables of this run's own pytest would reach the inner one.
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))
    }
    made = subprocess.run(
        [str(BOOTSTRAP), "--dev", "--python", version],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    if made.returncode == NOT_INSTALLED:
        pytest.skip(f"Python {version} is not installed")
    assert made.returncode == 0, made.stderr[-3000:]
    done = subprocess.run(
        [str(ROOT / f".venv-{version}" / "bin" / "python"), "-m", "pytest", "tests/core"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
