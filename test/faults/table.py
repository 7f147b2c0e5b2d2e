"""Faults of the kinds that were found or feared, one at a time, and the tests that have to notice each.

Text that occurs once in a file is replaced by other text. In C++ and CUDA, whose faults are all in one build, both are
expressions, or statements. ``python test/faults`` plants them.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """``old`` is replaced by ``new`` in a file below nvfp4_tensor; ``tests``: paths below test, and whether on a GPU."""

    file: str
    old: str
    new: str
    tests: str
    gpu: bool = False

    @property
    def is_native(self) -> bool:
        return self.file.startswith("csrc/")

    @property
    def name(self) -> str:
        return f"{self.file}: {' '.join(self.old.split())[:60]} -> {' '.join(self.new.split())[:60]}"


F = Fault

FAULTS = [
    # --- numerics: the reference decides every bit ---
    F("numerics/philox.py", "for _ in range(7):", "for _ in range(6):", "numerics/test_reference.py"),
    F("numerics/reference.py", "bytes_.roll(-1, dims=-1) << 8", "bytes_.roll(1, dims=-1) << 8", "numerics/test_reference.py"),
    F("numerics/reference.py", "mode == RoundingMode.STOCHASTIC:\n        assert", "False:\n        assert", "numerics/test_reference.py"),
    F("numerics/reference.py", "below = (bits.view(torch.float8_e4m3fn).float() < v)",
      "below = (bits.view(torch.float8_e4m3fn).float() <= v)", "numerics/test_reference.py"),
    F("numerics/reference.py", "return torch.where(s_b == 0, 0.0, enc)", "return enc", "numerics/test_reference.py ops/test_quantize.py"),
    F("numerics/random_state.py", "person=domain.encode()", "person=b''", "numerics/test_random_state.py"),
    F("numerics/random_state.py", "_CALLS = 0xD1342543DE82EF95", "_CALLS = 0", "training/linear/test_rounding_state.py training/linear/test_module.py"),
    F("numerics/optimizer_step.py", "rng_state, row0, SECOND_MOMENT_STREAM) >> 1",
      "rng_state, row0, MOMENT_STREAM) >> 1", "numerics/test_optimizer_step.py"),
    F("numerics/optimizer_step.py", "UNBIASED = 0.87", "UNBIASED = 1.0", "numerics/test_optimizer_step.py ops/test_optimizer.py"),
    F("numerics/eden.py", "SIGN_STREAM, SCALE_STREAM = 256, 257", "SIGN_STREAM, SCALE_STREAM = 256, 256", "numerics/test_eden.py"),
    F("numerics/spec.py", "return self.replace(round_mode=mode, scale_rounding=ScaleRounding.UP)",
      "return self.replace(round_mode=mode)", "numerics/test_spec.py"),
    # --- tensor and dispatch: aliasing, writes, what a product rounds ---
    F("tensor/tiles.py", "return largest == smallest", "return largest == largest", "tensor/test_tiles.py"),
    F("tensor/tiles.py", "scale = torch.where(mask, of_tiles, of_rows)", "scale = of_rows", "tensor/test_tiles.py"),
    F("tensor/windows.py", "codes[..., self.columns :] = 0", "pass", "dispatch/test_views.py dispatch/test_fuzz.py"),
    F("tensor/windows.py", "return self._replace(offset=self.offset - self.tiles()[0]", "return self._replace(offset=self.offset - 0",
      "dispatch/test_views.py dispatch/test_fuzz.py dispatch/test_writes.py"),
    F("dispatch/writes.py", "source = source.clone()  # it may overlap the window", "pass", "dispatch/test_writes.py dispatch/test_fuzz.py"),
    F("dispatch/writes.py", "window.stored.per_tensor_scale.copy_(new)", "pass", "dispatch/test_writes.py dispatch/test_fuzz.py"),
    F("dispatch/writes.py", "setattr(storage, _WRITES, writes_of(storage) + 1)", "pass", "training/weights/test_headroom.py"),
    F("dispatch/writes.py", "if not (~rounds | (new > old)).all():", "if False:", "dispatch/test_writes.py"),
    F("dispatch/straight_through.py", "return with_derivative_of(values, product(*tree_map(_multiplied, args), **tree_map(_multiplied, kwargs)))",
      "return values", "dispatch/test_straight_through.py"),
    F("dispatch/linears.py", "if w.activation_spec is not None:\n        return False", "if False:\n        return False",
      "matmul/test_matmul.py"),
    F("dispatch/linears.py", "x.dtype is not w.orig_dtype or", "", "matmul/test_matmul.py"),
    F("dispatch/views.py", "view.window.splits and t.spec.hadamard_sign is not None", "False", "dispatch/test_views.py dispatch/test_operators.py"),
    # --- matmul and ops ---
    F("matmul/product.py", "if beta == 0:\n        bias = None", "if False:\n        bias = None", "matmul/test_matmul.py dispatch/test_operators.py"),
    F("matmul/product.py", "bias = bias.expand(*a.shape[:-1], b.shape[-1]).mT", "bias = bias.expand(*a.shape[:-1], b.shape[-1])",
      "matmul/test_matmul.py dispatch/test_operators.py"),
    F("matmul/backends.py", "x.shape[0] < FP8_ROWS", "x.shape[0] <= FP8_ROWS", "matmul/test_fp8.py matmul/test_backends.py"),
    F("matmul/backends.py", "return min(own, (int(digits[:-1]), int(digits[-1]))) if digits else own",
      "return own", "matmul/test_backends.py"),
    F("ops/composite/step.py", "(at - starts).clamp(min=0)", "at", "ops/test_step.py generation/test_graph_decoder.py"),
    F("generation/decoder.py", "(ones.long().cumsum(-1) > 0) == ones", "(ones.long().cumsum(-1) > 0) >= ones", "generation/test_graph_decoder.py"),
    F("generation/runner.py", "position - starts[:, None]", "position - 0 * starts[:, None]", "generation/test_text.py"),
    F("generation/prompt.py", "seen & (keys >= self.starts[:, None, None])", "seen.expand(len(self.starts), -1, -1)", "generation/test_graph_decoder.py"),
    F("generation/prompt.py", "seen & (keys > queries - window)", "seen", "generation/test_graph_decoder.py"),
    F("ops/composite/step.py", "wide.square().mean(-1, keepdim=True) + eps", "wide.square().mean(-1, keepdim=True)", "ops/test_step.py"),
    # --- quantization ---
    F("quantization/observer.py", "torch.maximum(self.activation_amax, torch.ops.nvfp4.amax(x))", "torch.ops.nvfp4.amax(x)",
      "quantization/test_observer.py quantization/test_calibration.py"),
    F("quantization/observer.py", "magnitude = torch.where(finite, magnitude, -1.0)", "pass", "quantization/test_observer.py quantization/test_calibration.py"),
    F("quantization/names.py", "(*_WHOLE, *_with_other_names(JOINED))", "(*_WHOLE, *JOINED)", "quantization/test_model_families.py"),
    F("checkpoints/quantizing.py", "drafters=_drafters(source)", "drafters=()", "checkpoints/test_quantizing.py"),
    F("checkpoints/wrappers.py", "if not name.endswith(INTERLEAVED):", "if True:", "checkpoints/test_quantizing.py"),
    F("checkpoints/wrappers.py", "(matrix.t() if transposed else matrix)[rows]", "matrix[rows]", "checkpoints/test_quantizing.py"),
    F("integrations/diffusers.py", "file if len(checkpoint_files) == 1 else file.parent", "file.parent", "integrations/test_diffusers.py"),
    F("quantization/callers.py", '("fuse_lora", "unfuse_lora", "diffusers/loaders/peft.py"),', "", "integrations/test_diffusers.py"),
    F("quantization/model_plan.py", "if each.name in routers:", "if False:", "quantization/test_quantize_model.py quantization/test_model_families.py"),
    F("quantization/model_plan.py", "rows * ROWS_PER_COLUMN <= each.shape[-1]", "False", "quantization/test_quantize_model.py quantization/test_model_families.py quantization/test_plan.py"),
    F("quantization/model_plan.py", "not all(selected(name) for name in names)", "not any(selected(name) for name in names)",
      "quantization/test_quantize_model.py"),
    F("quantization/accuracy/gptq/rounding.py", "work[last:] -= factor.upper[first:last, last:].mT @ errors", "pass",
      "quantization/accuracy/gptq/test_rounding.py"),
    F("quantization/accuracy/gptq/rounding.py", "difference = cross.double()[:columns] - hessian.double()[:columns]",
      "difference = hessian.double()[:columns] - cross.double()[:columns]", "quantization/accuracy/gptq/test_rounding.py quantization/accuracy/gptq/test_run.py"),
    # --- checkpoints and the command line ---
    F("checkpoints/formats/table.py", "return codes >> 4 | codes << 4", "return codes", "checkpoints/formats/test_comfy.py"),
    F("checkpoints/formats/modelopt.py", "qdata, scale = qdata.mT.contiguous(), scale.mT.contiguous()",
      "qdata, scale = qdata.mT.contiguous(), scale", "checkpoints/formats/test_modelopt.py"),
    F("checkpoints/formats/table.py", "(missing := without_input_scale(entries))", "(missing := [])", "checkpoints/formats/test_table.py"),
    F("checkpoints/understood.py", "if foreign:\n        raise", "if False:\n        raise", "checkpoints/test_understood.py"),
    F("checkpoints/io/resumable_write.py", "if not _lock(lock) or not _is_at(lock, path):", "if not _is_at(lock, path):",
      "checkpoints/io/test_resumable_write.py"),
    F("checkpoints/io/resumable_write.py", "if temporary.exists() and any(", "if False and any(", "checkpoints/io/test_resumable_write.py nvfp4_cli/test_outputs.py"),
    F("quantization/linear.py", "return x if scale is None else x * scale.to(x.dtype)", "return x",
      "integrations/transformers/test_layouts.py"),
    F("checkpoints/comparison.py", "dequantize() * pre_scale, limit", "dequantize(), limit",
      "integrations/transformers/test_layouts.py"),
    F("checkpoints/io/folder.py", "if self.quantized_entry(name).group != BLOCK:", "if False:",
      "integrations/transformers/test_layouts.py"),
    F("checkpoints/formats/auto_round.py", "settings |= own", "pass",
      "integrations/transformers/test_layouts.py"),
    F("checkpoints/convert.py", "fits = is_fp8_cache(checkpoint.cache) and", "fits = True and",
      "integrations/transformers/test_layouts.py"),
    F("checkpoints/wrappers.py", "self.cache = source.cache if self.stored else None", "self.cache = source.cache",
      "integrations/transformers/test_layouts.py"),
    F("checkpoints/models/loading.py", "if tensor is None or attribute == PRE_SCALE:", "if tensor is None:",
      "integrations/transformers/test_layouts.py"),
    F("checkpoints/models/loading.py", "set_pre_scale(module, None if scale is None else scale.to(tensor.device))", "set_pre_scale(module, scale) if scale is not None else None",
      "integrations/transformers/test_layouts.py"),
    F("checkpoints/models/origins.py", "or not torch.equal(scale, scales[0]):", "or False:",
      "integrations/transformers/test_layouts.py"),
    F("checkpoints/understood.py", "if _TRANSFORMS.fullmatch(name) and value", "if False and value",
      "integrations/transformers/test_layouts.py"),
    F("integrations/transformers/quantizer.py", "dense = pre_scaled(weight.dequantize(dtype), module._buffers.get(PRE_SCALE))", "dense = weight.dequantize(dtype)",
      "integrations/transformers/test_layouts.py"),
    F("generation/families.py", "module.bias, module._buffers.get(PRE_SCALE))", "module.bias, None)",
      "integrations/transformers/test_layouts.py"),
    F("generation/plan.py", "if not _needs_operators(modules):", "if True:",
      "integrations/transformers/test_layouts.py"),
    F("tensor/fp8.py", "skipped = first % height if block[0] else 0", "skipped = 0", "tensor/test_fp8.py"),
    F("dispatch/fp8.py", "if w.spec.activations is None or w.transposed:", "if True:", "tensor/test_fp8.py"),
    F("checkpoints/models/fp8_joins.py", "if alike and not height and all(torch.equal(each.scale, first.scale) for each in parts):",
      "if alike and not height:", "integrations/transformers/test_fp8_layers.py"),
    F("checkpoints/models/loading.py", "(value.to(dtype) if isinstance(value, FP8Tensor)", "(value.values(dtype) if isinstance(value, FP8Tensor)",
      "integrations/transformers/test_fp8_layers.py"),
    F("checkpoints/formats/fp8.py", "(*leading, rows, 1, columns, 1) if", "(*leading, rows, columns) if",
      "integrations/transformers/test_fp8_layers.py"),
    F("generation/token_step.py", "return linear.input_scale is None and _is_weight_only(linear.weight)", "return _is_weight_only(linear.weight)",
      "integrations/transformers/test_layouts.py"),
    F("checkpoints/formats/unlabelled.py", "if pairs and fits]", "if pairs]",
      "checkpoints/formats/test_table.py"),
    F("checkpoints/formats/table.py", "if shape[-1] % scheme.group and layout.row_multiple == 1:", "if False:",
      "checkpoints/formats/test_table.py"),
    F("checkpoints/io/resumable_write.py", "self._manifest[\"key\"] is None or isinstance(exception[1], ValueError)", "self._manifest[\"key\"] is None",
      "checkpoints/test_damaged.py"),
    F("checkpoints/formats/modelopt.py", "algorithm != AWQ or keys_of(name)[\"input_scale\"] in checkpoint.shards.info", "True",
      "integrations/transformers/test_layouts.py"),
    F("checkpoints/formats/mlx.py", "if 0 < len(without) < len(schemes):", "if False:",
      "checkpoints/formats/test_table.py"),
    # --- training ---
    F("training/weights/headroom.py", "power = 2.0 ** math.ceil(", "power = 2.0 ** math.floor(", "training/weights/test_headroom.py"),
    F("training/weights/adamw.py", "return offset[0] if offset else 0", "return 0", "distributed/test_adamw.py"),
    F("training/weights/write_back.py", "chances = (need * (1 << 16)).ceil()", "chances = (need * (1 << 15)).ceil()",
      "training/weights/test_write_back.py"),
    F("training/weights/write_back.py", "torch.where(down.to(torch.float8_e4m3fn).float() == down, down, old)", "down",
      "training/weights/test_write_back.py"),
    F("training/weights/lora.py", "    _unwrap_saved_modules(model)\n", "", "training/weights/test_merge_lora.py"),
    F("training/weights/error_feedback.py", "if old < new:", "if old > new:", "training/weights/test_optimizer.py"),
    F("training/weights/error_feedback.py", "* (1 - 1 / beta1)", "* (1 - beta1)", "training/weights/test_optimizer.py"),
    F("training/linear/plan.py", "return autocast if autocast is not None and x.is_floating_point() else x.dtype", "return x.dtype", "training/linear/test_linear.py training/linear/test_calls.py"),
    # --- generation ---
    F("generation/cache.py", "append(keys, values, fresh[0][:, :, :older], fresh[1][:, :, :older], self.spec)",
      "append(keys, values, fresh[0][:, :, :older], fresh[0][:, :, :older], self.spec)", "generation/test_cache.py generation/test_attention.py"),
    F("generation/cache.py", "self.length += key_states.shape[-2]", "self.length += 1", "generation/test_cache.py"),
    F("generation/ring.py", "torch.arange(position - self.size + 1, position,", "torch.arange(position - self.size, position - 1,",
      "generation/test_ring.py"),
    F("generation/choice.py", "torch.where(ends - mass < self._top_p, mass, 0.0)", "torch.where(ends < self._top_p, mass, 0.0)",
      "generation/test_choice.py"),
    F("generation/choice.py", "torch.where(largest.isnan(), -1, tokens)", "tokens", "generation/test_choice.py generation/test_text.py"),
    F("generation/model_state.py", "and self._current_addresses() == self._addresses", "", "generation/test_changed_models.py generation/test_replaced_parts.py"),
    F("generation/model_state.py", "== self._child", "!= []", "generation/test_changed_models.py generation/test_replaced_parts.py"),
    # --- sharding and distributed ---
    F("sharding/layout.py", "start -= count", "start -= length", "sharding"),
    F("distributed/gradients.py", 'f"rank {group.rank()}"', '"rank 0"', "distributed/test_gradients.py"),
    F("distributed/gradients.py", "self.calls += 1", "pass", "distributed/test_gradients.py"),
    F("distributed/agreement.py", "if expected != found:", "if False:", "distributed/test_fsdp.py distributed/test_ddp.py distributed/test_fsdp_training.py"),
    # --- emulation, _compat, command line ---
    F("emulation/scales.py", "element.mantissa + 1", "element.mantissa", "emulation/test_brute_force.py"),
    F("_compat/frames.py", "while frame is not None", "while frame is None", "_compat/test_frames.py"),
    F("_compat/frames.py", '("accelerate", "nvfp4_tensor", "peft",', '("accelerate", "peft",', "_compat/test_frames.py dispatch/test_optimizers.py"),
    F("integrations/loading.py", "None in found or len(found) >= parts", "True", "integrations/test_loading.py"),
    F("integrations/loading.py", "sum(each[0] == shard for each in found) >= count", "bool(found)",
      "integrations/test_loading.py"),
    F("integrations/loading.py", "input_scale=_input_scale(loaded) if loaded.quantizes_activations else None", "input_scale=None",
      "integrations/test_serving.py integrations/test_loading.py"),
    F("testing/selftest.py", "differ &= ~(expected.isnan() & actual.isnan())", "pass", "testing"),
    # --- native: the arithmetic of GPUs, and of CPUs where no vectors are ---
    F("csrc/numerics/e2m1.h", "0x7FFFu + (inexact | (fixed >> 16 & 1u))", "0x8000u", "ops/test_quantize.py", gpu=True),
    F("csrc/numerics/e2m1.h", "(float_bits(v) >> 31) << 3", "0u", "ops/test_quantize.py", gpu=True),
    F("csrc/numerics/e4m3.h", "(bits == 0 && block_amax > 0.0f)", "false", "ops/test_quantize.py", gpu=True),
    F("csrc/numerics/philox.h", "(shift == 24 ? low >> 24 | high << 8 : low >> shift)", "(low >> shift)", "ops/test_quantize.py ops/test_optimizer.py", gpu=True),
    F("csrc/numerics/block.h", "to_four ? mul(base, 1.5f) : base", "base", "ops/test_quantize.py", gpu=True),
    F("csrc/numerics/adamw.h", "static_cast<float>(growth()) < chances", "true", "ops/test_optimizer.py"),
    F("csrc/numerics/adamw.h", "return {key.seed_low, key.seed_high, key.offset, stream};", "return key;", "ops/test_optimizer.py"),
    # --- native, CPU ---
    F("csrc/cpu/quantize/block_math.h", "less(error4, error6)", "less(error6, error4)", "ops/test_quantize.py"),
    F("csrc/cpu/quantize/block_math.h", "min(div(set(1.0f), mul(s_b, set(tensor.decode))), set(kFloatMax))",
      "div(set(1.0f), mul(s_b, set(tensor.decode)))", "ops/test_quantize.py"),
    F("csrc/cpu/attention/attend.h", "begin > token ? begin - token : 0", "0", "ops/test_attention.py generation/test_attention.py"),
    F("csrc/cpu/attention/attend.h", "sees_any ? 1.0f / divisor : 0.0f", "1.0f / divisor", "ops/test_attention.py"),
    F("csrc/cpu/attention/attend.h", "u.most[row] == top ? 1.0f : exp_of(u.most[row] - reference)", "1.0f", "ops/test_attention.py"),
    F("csrc/cpu/matmul/few.h", "first_row(p, group + 1) - first", "first_row(p, group) - first + 1", "matmul/test_products.py"),
    F("csrc/cpu/generation/decode_step.cpp", "m_.starts[row] - b.position", "m_.starts[row] - b.position - 1", "ops/test_generation.py"),
    F("csrc/cpu/generation/decode_step.cpp", "a.values += row * b.kv_size() * a.length", "a.values += 0", "ops/test_generation.py"),
    F("csrc/cpu/generation/decode_step.cpp", "a.rotation.cos += row * a.rotation.step", "a.rotation.cos += 0", "ops/test_generation.py"),
    F("csrc/cpu/generation/decode_step.cpp", "y + first * weight.rows", "y", "ops/test_generation.py"),
    F("ops/composite/decode_step.py", "positions < starts[:, None]", "positions <= starts[:, None]", "ops/test_generation.py"),
    F("csrc/cpu/generation/decode_step.cpp", "add(row, at.r.down, b.after_feed_forward, b.residual);",
      "add(row, at.r.down, b.after_feed_forward, 1.0f);", "ops/test_generation.py generation/test_natively.py"),
    # --- native, CUDA ---
    F("csrc/cuda/block/block.cuh", "fabsf(*how.amax)", "*how.amax", "ops/test_quantize.py", gpu=True),
    F("csrc/cuda/block/block.cuh", "amax_bits >= kInfinity<T> ? kE4M3Nan : s_bits", "s_bits", "ops/test_quantize.py", gpu=True),
    F("csrc/cuda/block/block.cuh", "offset.first + static_cast<int64_t>(row) * offset.width + column",
      "offset.first + static_cast<int64_t>(row * static_cast<uint32_t>(offset.width)) + column - (column > 63)", "ops/test_quantize.py ops/test_pairs.py", gpu=True),
    F("csrc/cuda/matmul/few_rows/kernel.cuh", "stride * 4 + (next_band ? 96 : 0)", "stride * 4 + (next_band ? 92 : 0)",
      "matmul/test_cuda_matmul.py matmul/test_cuda_grouped.py", gpu=True),
    F("csrc/cuda/matmul/few_rows/kernel.cuh", "left > 16 ? 8 : 0", "left > 48 ? 8 : 0",
      "matmul/test_cuda_matmul.py matmul/test_cuda_grouped.py", gpu=True),
    F("csrc/cuda/attention/codes.cuh", "exp2_of(shared.left.most[warp][row] - most)", "1.0f", "ops/test_attention.py generation/test_attention.py", gpu=True),
    F("csrc/cuda/attention/codes.cuh", "token < mask.seen.begin || token >= mask.seen.end", "token >= mask.seen.end",
      "ops/test_attention.py generation/test_attention.py", gpu=True),
    F("csrc/cuda/optimizer/adamw.cu", "max(least, top - min(top, uint32_t{kMostBelow} << 23))", "least",
      "ops/test_optimizer.py", gpu=True),
    F("csrc/cuda/optimizer/adamw.cu", "with_stream(key, kSecondMomentStream).block_words(number)", "key.block_words(number)",
      "ops/test_optimizer.py", gpu=True),
    F("csrc/cuda/generation/context.cuh", "min(position - start, most)", "min(position, most)", "ops/test_step.py", gpu=True),
    F("csrc/cuda/generation/norm.cu", "block_sum(sum, warps) / p.columns + p.norm.eps", "block_sum(sum, warps) / p.columns",
      "ops/test_step.py", gpu=True),
]  # fmt: skip
