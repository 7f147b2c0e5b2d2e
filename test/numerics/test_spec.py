import copy
import itertools
import pickle

import pytest

from nvfp4_tensor import FourOverSix, QuantizeSpec, RoundingMode, ScaleRounding, ScaleSearch

MODES_OF_CODES = [mode for mode in RoundingMode if mode != RoundingMode.EDEN]
ALL_SPECS = [
    QuantizeSpec(
        round_mode=mode,
        block_rows=rows,
        scale_rounding=up,
        four_over_six=None if choice == "search" else choice,
        scale_ceiling=ceiling,
        hadamard_sign=sign,
        random_bits=bits,
        scale_search="mse" if choice == "search" else None,
    )
    for mode, rows, up, choice, ceiling, sign, bits in itertools.product(
        MODES_OF_CODES, (1, 16), ScaleRounding, (None, "mae", "mse", "search"), (448, 256), (None, 0, 0xD7E8), (16, 8)
    )
] + [QuantizeSpec(round_mode="eden", scale_ceiling=ceiling) for ceiling in (448, 256)]
ALL_SPECS += [spec.replace(row_scaled=True) for spec in ALL_SPECS if spec.block_rows == 1 and not spec.is_eden]


def test_every_spec_survives_packing_and_packs_differently():
    packed = [spec.pack() for spec in ALL_SPECS]
    assert [QuantizeSpec.unpack(bits) for bits in packed] == ALL_SPECS
    assert len(set(packed)) == len(ALL_SPECS) == len(set(ALL_SPECS))


def test_unpack_raises_for_other_integers():
    refused = r"QuantizeSpec.pack\(\)|hardware_rounding needs|mutually exclusive|row_scaled|eden"
    for bits in (0x30, 0x800, 0xC00, 0x410, 0x1003, 0x1004, 1 << 16, 1 << 8, 1 << 40, -1):
        with pytest.raises(ValueError, match=refused):
            QuantizeSpec.unpack(bits)


def test_defaults_conversions_and_what_replace_resets():
    """Four-over-six, a search and EDEN have a ceiling of 256 by default, and replace() gives each its own."""
    plain, searched, eden = QuantizeSpec(), QuantizeSpec(scale_search="mse"), QuantizeSpec(round_mode="eden")
    assert plain == QuantizeSpec(round_mode="rne", block_rows=1, scale_ceiling=448, random_bits=16)
    assert QuantizeSpec(four_over_six=True).four_over_six is FourOverSix.MSE
    assert QuantizeSpec(four_over_six=False).four_over_six is None
    assert QuantizeSpec(hadamard_sign=True).hadamard_sign == 0xD7E8
    assert QuantizeSpec(scale_rounding="up").scale_rounding is ScaleRounding.UP
    assert searched == QuantizeSpec(scale_search=True) == QuantizeSpec(scale_search=ScaleSearch.MSE)
    assert QuantizeSpec(four_over_six="mae").scale_ceiling == searched.scale_ceiling == eden.scale_ceiling == 256
    assert plain.replace(four_over_six="mse").scale_ceiling == 256
    assert QuantizeSpec(four_over_six="mse").replace(four_over_six=None) == plain
    assert plain.replace(scale_search="mse") == searched and searched.replace(scale_search=None) == plain
    assert plain.replace(round_mode="eden").replace(round_mode="away") == QuantizeSpec(round_mode="away")
    assert searched.replace(round_mode="stochastic").scale_ceiling == 256
    assert QuantizeSpec(scale_ceiling=256).replace(round_mode="away").scale_ceiling == 256
    stochastic = plain.with_round_mode("stochastic")
    assert stochastic == QuantizeSpec(round_mode="stochastic", scale_rounding="up")
    assert plain.with_round_mode("zero") == QuantizeSpec(round_mode="zero")
    assert [spec.largest_value for spec in (plain, eden)] == [2688.0, 1536.0]


def test_copies_and_pickles_are_equal():
    spec = QuantizeSpec(round_mode="stochastic", hadamard_sign=True, random_bits=8, hardware_rounding=True)
    assert copy.deepcopy(spec) is spec and spec == pickle.loads(pickle.dumps(spec)) == QuantizeSpec.unpack(spec.pack())


def test_which_columns_stand_together():
    specs = QuantizeSpec(), QuantizeSpec(hadamard_sign=True), QuantizeSpec(round_mode="eden")
    assert [spec.rotation for spec in specs] == [None, 16, 128]
    assert [spec.column_multiple for spec in specs] == [16, 16, 128]
    assert [spec.is_stochastic for spec in specs] == [False, False, True]


WRONG = {
    "round_mode": ["nearest"], "block_rows": [2], "scale_rounding": ["down", 7], "four_over_six": ["rmse", 3],
    "scale_ceiling": [512], "scale_search": ["mae", 2], "hadamard_sign": [1 << 16, False, 1.5], "random_bits": [32],
    "row_scaled": [1],
}  # fmt: skip
NOT_OF_EDEN = {
    "block_rows": 16, "random_bits": 8, "scale_rounding": "up", "four_over_six": "mse", "scale_search": "mse",
    "hadamard_sign": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        *({name: value} for name, values in WRONG.items() for value in values),
        *({"round_mode": "eden", name: value} for name, value in NOT_OF_EDEN.items()),
        {"scale_search": True, "four_over_six": True},
        {"hardware_rounding": True, "round_mode": "stochastic"},
        {"row_scaled": True, "block_rows": 16},
    ],
)
def test_invalid_options_raise(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        QuantizeSpec(**options)


def test_str_names_what_is_not_plain():
    full = {"round_mode": "stochastic", "block_rows": 16, "scale_rounding": "up", "four_over_six": "mae"}
    full |= {"scale_ceiling": 448, "hadamard_sign": True, "random_bits": 8, "hardware_rounding": True}
    for options, text in (
        ({}, "rne, 1x16"),
        (full, "stochastic, 16x16, scales up, 4/6 mae, ceiling 448, hadamard 0xd7e8, 8 random bits (hardware)"),
        ({"scale_search": "mse"}, "rne, 1x16, search mse"),
        ({"round_mode": "eden", "scale_ceiling": 448}, "eden, 1x16, ceiling 448"),
    ):
        assert str(QuantizeSpec(**options)) == text
