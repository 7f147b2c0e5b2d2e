import copy
import itertools
import pickle

import pytest
from expecttest import assert_expected_inline

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


@pytest.mark.parametrize(
    "bits", [3 << 4, 2 << 10, 3 << 10, 1 << 10 | 1 << 4, 1 << 12 | 3, 1 << 12 | 1 << 2, 1 << 16, 1 << 8, 1 << 40, -1]
)
def test_unpack_raises_for_other_integers(bits):
    with pytest.raises(
        ValueError, match=r"QuantizeSpec.pack\(\)|hardware_rounding needs|mutually exclusive|row_scaled|eden"
    ):
        QuantizeSpec.unpack(bits)


def test_defaults_and_conversions():
    assert QuantizeSpec() == QuantizeSpec(round_mode="rne", block_rows=1, scale_ceiling=448, random_bits=16)
    assert QuantizeSpec(four_over_six=True).four_over_six is FourOverSix.MSE
    assert QuantizeSpec(four_over_six="mae").scale_ceiling == 256
    assert QuantizeSpec(four_over_six=False).four_over_six is None
    assert QuantizeSpec(hadamard_sign=True).hadamard_sign == 0xD7E8
    assert QuantizeSpec(scale_rounding="up").scale_rounding is ScaleRounding.UP


def test_replace_gives_four_over_six_its_own_ceiling():
    assert QuantizeSpec().replace(four_over_six="mse").scale_ceiling == 256
    assert QuantizeSpec(four_over_six="mse").replace(four_over_six=None).scale_ceiling == 448
    assert QuantizeSpec(scale_ceiling=256).replace(round_mode="away").scale_ceiling == 256


def test_a_search_and_eden_have_a_ceiling_of_256():
    assert QuantizeSpec(scale_search=True).scale_search is ScaleSearch.MSE
    assert QuantizeSpec(scale_search=ScaleSearch.MSE) == QuantizeSpec(scale_search="mse")
    assert QuantizeSpec(scale_search="mse").scale_ceiling == QuantizeSpec(round_mode="eden").scale_ceiling == 256
    assert QuantizeSpec().replace(scale_search="mse").replace(scale_search=None) == QuantizeSpec()
    assert QuantizeSpec().replace(round_mode="eden").replace(round_mode="away") == QuantizeSpec(round_mode="away")
    assert QuantizeSpec(scale_search="mse").replace(round_mode="stochastic").scale_ceiling == 256


def test_which_columns_stand_together():
    specs = QuantizeSpec(), QuantizeSpec(hadamard_sign=True), QuantizeSpec(round_mode="eden")
    assert [spec.rotation for spec in specs] == [None, 16, 128]
    assert [spec.column_multiple for spec in specs] == [16, 16, 128]
    assert [spec.is_stochastic for spec in specs] == [False, False, True]


def test_hardware_rounding_needs_its_companions():
    spec = QuantizeSpec(round_mode="stochastic", random_bits=8, hardware_rounding=True)
    assert QuantizeSpec.unpack(spec.pack()) == spec
    with pytest.raises(ValueError, match="random_bits=8"):
        QuantizeSpec(round_mode="stochastic", hardware_rounding=True)


@pytest.mark.parametrize(
    "argument",
    [
        {"round_mode": "nearest"},
        {"block_rows": 2},
        {"scale_rounding": "down"},
        {"scale_rounding": 7},
        {"four_over_six": "rmse"},
        {"four_over_six": 3},
        {"scale_ceiling": 512},
        {"scale_search": "mae"},
        {"scale_search": 2},
        {"scale_search": True, "four_over_six": True},
        {"round_mode": "eden", "block_rows": 16},
        {"round_mode": "eden", "random_bits": 8},
        {"round_mode": "eden", "scale_rounding": "up"},
        {"round_mode": "eden", "four_over_six": "mse"},
        {"round_mode": "eden", "scale_search": "mse"},
        {"round_mode": "eden", "hadamard_sign": True},
        {"hadamard_sign": 1 << 16},
        {"hadamard_sign": False},
        {"hadamard_sign": 1.5},
        {"random_bits": 32},
    ],
)
def test_invalid_options_raise(argument):
    with pytest.raises(ValueError, match=next(iter(argument))):
        QuantizeSpec(**argument)


def test_copies_are_equal():
    spec = QuantizeSpec(round_mode="stochastic", hadamard_sign=True)
    assert copy.deepcopy(spec) == spec == pickle.loads(pickle.dumps(spec))


def test_str_names_what_is_not_plain():
    assert_expected_inline(str(QuantizeSpec()), """rne, 1x16""")
    assert_expected_inline(
        str(
            QuantizeSpec(
                round_mode="stochastic",
                block_rows=16,
                scale_rounding="up",
                four_over_six="mae",
                scale_ceiling=448,
                hadamard_sign=True,
                random_bits=8,
                hardware_rounding=True,
            )
        ),
        """stochastic, 16x16, scales up, 4/6 mae, ceiling 448, hadamard 0xd7e8, 8 random bits (hardware)""",
    )
    assert_expected_inline(str(QuantizeSpec(scale_search="mse")), """rne, 1x16, search mse""")
    assert_expected_inline(str(QuantizeSpec(round_mode="eden", scale_ceiling=448)), """eden, 1x16, ceiling 448""")


def test_a_pickle_without_the_newer_fields_is_of_a_spec_without_them():
    spec = QuantizeSpec(four_over_six="mse")
    fields = {name: value for name, value in vars(spec).items() if name != "scale_search"}
    older = object.__new__(QuantizeSpec)
    vars(older).update(fields)
    assert older == spec and hash(older) == hash(spec) and older.pack() == spec.pack()
