"""Texts that models of transformers write, and their logits along a given text."""

import torch
from transformers import LogitsProcessor


class _Forced(LogitsProcessor):
    """Make a model write the tokens (B, T) of a text that begins with its prompt."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, ids, scores):
        return torch.full_like(scores, -torch.inf).scatter_(1, self.tokens[:, ids.shape[1], None], 0.0)


def prompt(model, batch=1, length=8):
    return torch.randint(3, 300, (batch, length), generator=torch.Generator().manual_seed(5)).to(model.device)


def written(model, ids, count=12, along=None, **arguments):
    """Return (tokens, logits (B, count, V)) of greedy search by ``generate``.

    Args:
        along: a text (B, T) that begins with ``ids``, which the model then writes in place of its own. So two models
            can be compared token by token; their own texts part at the first tie.
    """
    forced = {} if along is None else {"logits_processor": [_Forced(along)]}
    out = model.generate(
        ids, max_new_tokens=count, do_sample=False, output_logits=True, return_dict_in_generate=True,
        **forced, **arguments,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits, 1).float()


def own_logits(model, ids):
    """Return the logits (B, T, V) of the model's own forward for a text without a cache."""
    with torch.no_grad():
        return type(model).forward(model, ids, use_cache=False).logits.float()


def relative_error(logits, expected):
    """Return the norm of the error of each token's logits (B, T, V) by the norm of the expected ones: (B, T)."""
    return (logits - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)


def gaps(model, text, count, rank=0):
    """Return how far the last ``count`` tokens of a text (B, T) are below the largest logits, in their deviations.

    rank: below the (rank + 1)-th largest ones.
    """
    logits = own_logits(model, text[:, :-1])[:, -count:]
    chosen = logits.gather(-1, text[:, -count:, None])[..., 0]
    return (logits.topk(rank + 1).values[..., rank] - chosen) / logits.std(-1)


def assert_writes_its_own(model, ids, bound=0.02, count=12, **arguments):
    """Check a text that the model writes against its own forward over it: logits, and each choice up to ties.

    Returns the text (B, T) and the errors (B, count), of which the median has the bound.
    """
    tokens, logits = written(model, ids, count, **arguments)
    expected = own_logits(model, tokens[:, :-1])[:, ids.shape[1] - 1 :]
    error, gap = relative_error(logits, expected), gaps(model, tokens, expected.shape[1])
    assert error.median() < bound and gap.median() == 0 and (gap < 10 * bound + 20 * error).all()
    return tokens, error
