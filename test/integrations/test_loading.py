"""What a server's loaders have filled, as far as they are recorded."""

import torch
from torch import nn

from nvfp4_tensor.integrations.loading import Loader, has_all_experts, is_whole


def loaded(*calls, experts=False):
    layer, parameter = nn.Module(), nn.Parameter(torch.zeros(4, 2))
    parameter.weight_loader = Loader(layer, lambda *args, **kwargs: None, experts)
    for call in calls:
        parameter.weight_loader(parameter, torch.zeros(4, 2), **call)
    return parameter


def test_a_fused_weight_is_whole_with_all_of_its_parts():
    parts = [{"loaded_shard_id": each} for each in "qkv"]
    assert [is_whole(loaded(*parts[:n]), 3) for n in range(4)] == [False, False, False, True]
    assert is_whole(loaded({}), 3)  # one tensor of all parts


def test_experts_are_whole_with_each_shard_of_each():
    calls = [{"shard_id": shard, "expert_id": expert} for shard in ("w1", "w3") for expert in range(2)]
    assert has_all_experts(loaded(*calls, experts=True), ("w1", "w3"), 2)
    for missing in range(4):
        some = [call for i, call in enumerate(calls) if i != missing]
        assert not has_all_experts(loaded(*some, experts=True), ("w1", "w3"), 2)
