"""Small models saved in a folder, like published ones."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.21")
from helpers.hub_models import SIZES  # noqa: E402

from nvfp4_tensor.integrations import transformers as nvfp4  # noqa: E402


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.disable_progress_bar()


@pytest.fixture
def natively():
    """Let our reader take checkpoints of compressed-tensors."""
    nvfp4.read_compressed_tensors()
    yield
    nvfp4.read_compressed_tensors(natively=False)


@pytest.fixture
def llama(tmp_path):
    """Return make(**config changes), which returns (bfloat16 model, folder where it was saved)."""

    def make(**changes):
        torch.manual_seed(0)
        sizes = {**SIZES, "intermediate_size": 176, "head_dim": None, "pad_token_id": None}
        sizes |= {"tie_word_embeddings": True, **changes}
        config = transformers.LlamaConfig(**sizes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        for w in model.parameters():
            if w.dim() > 1:  # again, in float32: torch 2.11's normal numbers in bfloat16 all end at 3.3
                w.data = torch.randn(w.shape).mul_(0.1).bfloat16()
        model.tie_weights()
        folder = tmp_path / "dense"
        model.save_pretrained(folder)
        return model, folder

    return make


@pytest.fixture
def ids():
    return torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def trainer():
    """Return make(model, folder, steps, **options), which returns transformers' Trainer on random texts."""

    def make(model, folder, steps, **options):
        data = torch.randint(64, (32, 12), generator=torch.Generator().manual_seed(3))
        arguments = transformers.TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=4, learning_rate=0.01, report_to=[], use_cpu=True,
            disable_tqdm=True, logging_strategy="no", **options,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in data]
        return transformers.Trainer(model, arguments, train_dataset=rows)

    return make
