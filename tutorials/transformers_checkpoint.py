"""A checkpoint through transformers: python tutorials/transformers_checkpoint.py

SmolLM2-135M-Instruct is saved as an NVFP4 checkpoint in ModelOpt's layout, with its quality in the model card. The
folder is loaded with from_pretrained and generates text. LoRA fine-tunes the model on other text than the evaluation's;
the adapters are saved and loaded again. This takes some minutes on a CPU.
"""

import argparse
import json
from pathlib import Path

import torch

from nvfp4_tensor import NVFP4Tensor, NVFP4WeightOnlyConfig, model_size

try:
    import peft

    from nvfp4_cli.demo.model import evaluation_tokens, gguf_path, load_model, prompt_tokens
    from nvfp4_tensor.testing.model_quality import perplexity

    gguf_path()
    dense, tokenizer = load_model()  # before importing transformers, which reads the offline setting once
    from transformers import AutoModelForCausalLM

    import nvfp4_tensor.integrations.transformers as nvfp4
except (ImportError, FileNotFoundError) as missing:
    raise SystemExit(f"this tutorial needs peft and the packages of the demo: {missing}") from None

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--output", type=Path, default=Path("smollm2"), help="the folder to write to")
parser.add_argument("--evaluate", type=int, default=4096, help="tokens to evaluate the model on")
parser.add_argument("--steps", type=int, default=30, help="steps of training")
parser.add_argument("--length", type=int, default=256, help="tokens per step")
arguments = parser.parse_args()
text = evaluation_tokens(tokenizer, arguments.evaluate + arguments.steps * arguments.length)
judged, to_learn = text[: arguments.evaluate], text[arguments.evaluate :].view(arguments.steps, 1, arguments.length)
folders = {name: arguments.output / name for name in ("dense", "SmolLM2-135M-NVFP4", "adapters")}

# --- quantize while loading, save ------------------------------------------------------------------------------------
dense.save_pretrained(folders["dense"])
settings = nvfp4.NVFP4TensorConfig(NVFP4WeightOnlyConfig(four_over_six=True))
model = AutoModelForCausalLM.from_pretrained(folders["dense"], quantization_config=settings)
print(f"quantized: {model_size(model)}")
measured = {"NVFP4, four-over-six": perplexity(model, judged, 1024), "bfloat16": perplexity(dense, judged, 1024)}
nvfp4.save(
    model,
    folders["SmolLM2-135M-NVFP4"],
    tokenizer=tokenizer,
    base_model="HuggingFaceTB/SmolLM2-135M-Instruct",
    perplexity=measured,
    text=f"{len(judged):,} tokens of Python's help topics",
    metadata={"license": "apache-2.0"},
)
print((folders["SmolLM2-135M-NVFP4"] / "README.md").read_text().partition("## Use")[0])

# --- load it with from_pretrained, generate --------------------------------------------------------------------------
base = AutoModelForCausalLM.from_pretrained(folders["SmolLM2-135M-NVFP4"], dtype=torch.float32)
algorithm = json.loads((folders["SmolLM2-135M-NVFP4"] / "config.json").read_text())["quantization_config"]["quant_algo"]
quantized = [p for p in base.parameters() if isinstance(p, NVFP4Tensor)]
codes = [weight.qdata.clone() for weight in quantized]
assert algorithm == "W4A16_NVFP4" and len(quantized) == 210
assert all(torch.equal(p.qdata, q.qdata) for p, q in zip(base.parameters(), model.parameters(), strict=True) if
           isinstance(p, NVFP4Tensor))  # fmt: skip
prompt = prompt_tokens(tokenizer)
answer = base.generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :]
print("answer:", tokenizer.decode(answer, skip_special_tokens=True))
assert "Paris" in tokenizer.decode(answer)

# --- fine-tune adapters, save them, load them ------------------------------------------------------------------------
torch.manual_seed(0)
lora = peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
tuned = peft.get_peft_model(base, lora)
before = perplexity(tuned, judged, 1024)
optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-3)
for step, ids in enumerate(to_learn):
    loss = tuned(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1} of {arguments.steps}: loss {loss.item():.3f}")
after = perplexity(tuned, judged, 1024)
print(f"perplexity on other text: {before:.3f} -> {after:.3f}")
assert after < before
assert all(torch.equal(weight.qdata, code) for weight, code in zip(quantized, codes, strict=True))
tuned.save_pretrained(folders["adapters"])
again = AutoModelForCausalLM.from_pretrained(folders["SmolLM2-135M-NVFP4"], dtype=torch.float32)
again = peft.PeftModel.from_pretrained(again, folders["adapters"])
with torch.no_grad():
    assert torch.equal(again(prompt).logits, tuned(prompt).logits)
adapters = sum(file.stat().st_size for file in folders["adapters"].glob("*.safetensors"))
print(f"adapters: {adapters / 1e6:.1f} MB, model: {model_size(model).total / 1e6:.1f} MB")
