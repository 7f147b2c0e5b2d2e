"""Read from the sources of vLLM and SGLang which linears they join: ``make_joined.py SITE_PACKAGES > joined.json``.

Three forms are read: ``packed_modules_mapping`` (joined: parts), lists of (joined, part, shard), and dicts of part:
(joined, shard). test_model_families.py holds our table to the result.
"""

import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}
ROOTS = ("vllm/model_executor/models", "vllm/models", "sglang/srt/models", "sglang/multimodal_gen")
TABLES = re.compile(r"packed_modules_mapping|stacked_params|orig_to_new_stacked", re.IGNORECASE)
OTHERS = re.compile(
    r"conv1d|\.bias$|padding|^(bf16|norm|embed|pos_embed|rotary|(img|txt)_\w+|attn\.(to|add)_\w+|attention\.to_\w+)$"
)
"""Parts that are not linears, in tables of other things."""


def text(node: ast.expr | None) -> str:
    return node.value.strip(".") if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def groups_in(tree: ast.AST) -> Iterator[list[str]]:
    """Yield the parts of each joined linear in the tables of a module."""
    for node in ast.walk(tree):
        groups: defaultdict[str, list[str]] = defaultdict(list)
        if isinstance(node, ast.List | ast.Tuple):
            for row in node.elts:  # (joined, part, shard)
                if isinstance(row, ast.Tuple) and len(row.elts) == 3 and isinstance(row.elts[2], ast.Constant):
                    groups[text(row.elts[0])].append(text(row.elts[1]))
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(value, ast.Tuple) and len(value.elts) == 2 and isinstance(value.elts[1], ast.Constant):
                    groups[text(value.elts[0])].append(text(key))  # part: (joined, shard)
                elif isinstance(value, ast.List):
                    groups[text(key)].extend(text(each) for each in value.elts)  # joined: parts
        yield from (parts for joined, parts in groups.items() if joined and all(parts))


def plain(parts: list[str]) -> tuple[str, ...]:
    """Return the names of the modules without their common prefix, in order."""
    kept = [part.removesuffix(".weight") for part in dict.fromkeys(parts) if not OTHERS.search(part)]
    prefixes = {part.rpartition(".")[0] for part in kept}
    return tuple(sorted(part.rpartition(".")[2] if len(prefixes) == 1 else part for part in kept))


def main(site: Path) -> None:
    found: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    for path in sorted(path for root in ROOTS for path in (site / root).rglob("*.py")):
        source = path.read_text()
        for parts in groups_in(ast.parse(source)) if TABLES.search(source) else ():
            if len(group := plain(parts)) > 1 and all(re.fullmatch(r"[a-z][\w.]*", each) for each in group):
                found[group].add(str(path.relative_to(site).with_suffix("")))
    rows = [{"parts": list(parts), "for example": min(where)} for parts, where in sorted(found.items())]
    print(json.dumps({"versions": VERSIONS, "groups": rows}, indent=1))


main(Path(sys.argv[1]))
