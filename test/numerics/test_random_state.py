"""States from a seed, a name and a count, by the contract's words (section 4)."""

import hashlib

import torch

from nvfp4_tensor.numerics.random_state import rng_state_of, rng_state_of_call, rng_state_row


def test_a_seed_is_eight_bytes_of_a_hash_personalized_by_its_domain():
    for domain, seed, name in (("layer", 7, "model.0"), ("adamw", 7, "model.0"), ("write back", -1, "")):
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8, person=domain.encode()).digest()
        expected = int.from_bytes(digest, "little", signed=True), 5
        assert rng_state_row(domain, seed, name, 5) == expected
        state = rng_state_of(domain, seed, name, 5, torch.device("cpu"))
        assert state.dtype == torch.int64 and tuple(state.tolist()) == expected
    assert rng_state_row("layer", 7, "a", 0) != rng_state_row("adamw", 7, "a", 0)


def test_a_call_adds_its_number_times_a_constant_to_the_seed():
    for seed in (5, -5, 2**63 - 1, -(2**63)):
        state = torch.tensor([seed, 9])
        for call in (0, 1, 2, 1000):
            sum_of_both = (seed + call * 0xD1342543DE82EF95) % 2**64
            signed = sum_of_both - 2**64 if sum_of_both >= 2**63 else sum_of_both
            assert rng_state_of_call(state, call).tolist() == [signed, 9]
