"""The table of Llama-like model types."""

from __future__ import annotations

from eightfold.models.families import CHANGES_RESULTS, DECODER_FAMILIES


def test_what_a_family_reads_is_refused_elsewhere_or_is_its_own() -> None:
    own = {"qkv_bias"}
    for family in DECODER_FAMILIES.values():
        assert family.reads - own <= CHANGES_RESULTS.keys()


def test_every_neutral_value_includes_a_key_that_is_not_there() -> None:
    assert all(neutral[0] is None for neutral in CHANGES_RESULTS.values())


def test_families_with_experts_say_where_their_width_is() -> None:
    mixtures = {name: family.mixture for name, family in DECODER_FAMILIES.items() if family.mixture is not None}
    assert mixtures.keys() == {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe"}
    assert all(mixture.top_k <= mixture.num_experts for mixture in mixtures.values())
