import copy
import itertools
import pickle

import pytest
from expecttest import assert_expected_inline

from nvfp4_tensor import FourOverSix, QuantizeSpec, RoundingMode, ScaleRounding

ALL_SPECS = [
    QuantizeSpec(
        round_mode=mode,
        block_rows=rows,
        scale_rounding=up,
        four_over_six=four,
        scale_ceiling=ceiling,
        hadamard_sign=sign,
        random_bits=bits,
    )
    for mode, rows, up, four, ceiling, sign, bits in itertools.product(
        RoundingMode, (1, 16), ScaleRounding, (None, "mae", "mse"), (448, 256), (None, 0, 0xD7E8), (16, 8)
    )
]


def test_every_spec_survives_packing_and_packs_differently():
    packed = [spec.pack() for spec in ALL_SPECS]
    assert [QuantizeSpec.unpack(bits) for bits in packed] == ALL_SPECS
    assert len(set(packed)) == len(ALL_SPECS) == len(set(ALL_SPECS))


@pytest.mark.parametrize("bits", [3 << 4, 1 << 10, 1 << 16, 1 << 8, 1 << 40, -1])
def test_what_no_spec_packs_to_is_refused(bits):
    with pytest.raises(ValueError, match=r"QuantizeSpec.pack\(\)|hardware_rounding needs"):
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
        {"hadamard_sign": 1 << 16},
        {"hadamard_sign": False},
        {"hadamard_sign": 1.5},
        {"random_bits": 32},
    ],
)
def test_what_a_spec_refuses(argument):
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
