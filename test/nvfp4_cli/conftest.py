"""A model of two layers with a tokenizer, in a folder, dense and as NVFP4: what the commands run on."""

import json

import pytest
import torch

TEXT = "the quick brown fox jumps over the lazy dog and the dog sleeps on while the fox runs far away " * 12


@pytest.fixture(scope="session")
def dense(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("cli") / "dense"
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, dtype="bfloat16", tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    trained.train_from_iterator([TEXT], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<eos>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text(dense):
    file = dense.parent / "sample.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="session")
def quantized(dense):
    from nvfp4_tensor import checkpoints

    folder = dense.parent / "nvfp4"
    checkpoints.quantize(dense, folder, progress=False)
    return folder


@pytest.fixture
def run(capsys):
    """Runs a command that ends with that status; what it printed, parsed with --json, or why it failed."""
    import nvfp4_cli

    def call(*arguments, status=0):
        given = [str(argument) for argument in arguments]
        found = nvfp4_cli.main(given)
        captured = capsys.readouterr()
        assert found == status, captured.err
        if status:
            return captured.err
        return json.loads(captured.out) if "--json" in given else captured.out

    return call
