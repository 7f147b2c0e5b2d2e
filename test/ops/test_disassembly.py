"""What the built CUDA library's machine code has and has not: for hardware that is not at hand, and for rare orders."""

import gzip
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import filelock
import pytest

import nvfp4_tensor

pytestmark = pytest.mark.slow

# 2 dtypes by 3 shapes by 1 to 3 weights; up to 8 rows by 1 or 3 weights, normed; gated, plain and normed.
FEW_ROWS_SM90 = 2 * (3 * 3 + 2 * 2 + 3 + 2)


def _cuobjdump():
    """cuobjdump, from the CUDA toolkit or from Triton's package; None where there is neither."""
    found = shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin")
    packaged = Path(sysconfig.get_path("purelib")) / "triton/backends/nvidia/bin/cuobjdump"
    return found or (str(packaged) if packaged.exists() else None)


class Disassembly:
    """Machine code by architecture. It takes half a minute and 300 MB each, so that processes share it in a folder."""

    def __init__(self, cuobjdump: str, library: Path, folder: Path) -> None:
        self.command, self.library, self.folder = cuobjdump, str(library), folder
        command = [cuobjdump, "-lelf", self.library]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.archs = set(re.findall(r"\.(sm_\w+)\.cubin", listed)) - {"sm_80"}

    def of(self, arch: str) -> str:
        """Return the machine code for an architecture, or skip the test where it was not built."""
        if arch not in self.archs:
            pytest.skip(f"the library was built without {arch}")
        path = self.folder / f"{arch}.gz"
        with filelock.FileLock(self.folder / f"{arch}.lock"):
            if path.exists():
                return gzip.decompress(path.read_bytes()).decode()
            command = [self.command, "-sass", "-arch", arch, self.library]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            path.write_bytes(gzip.compress(text.encode(), 1))
            return text

    def functions(self, arch: str, names: str = "") -> list[tuple[str, str]]:
        """Return (first line, machine code) of the functions whose names contain a pattern."""
        found = [(f.split("\n")[0], f) for f in self.of(arch).split("Function : ")]
        return [(name, code) for name, code in found if re.search(names, name)]


@pytest.fixture(scope="module")
def disassembly(tmp_path_factory):
    """The machine code of the built library for Hopper and Blackwell."""
    libraries = sorted(Path(nvfp4_tensor.__file__).parent.glob("lib/libnvfp4_cuda*.so"))
    if not libraries:
        pytest.skip("the CUDA library was not built here")
    if (cuobjdump := _cuobjdump()) is None:
        pytest.skip("no disassembler: neither the CUDA toolkit's cuobjdump nor Triton's package is here")
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "disassembly"
    folder.mkdir(exist_ok=True)
    return Disassembly(cuobjdump, libraries[0], folder)


def archs(*names):
    """Parameters. The code of some is that of others but for the name, so that a test of all is exhaustive."""
    alike = {"sm_103a", "sm_110a", "sm_121a"}
    return [pytest.param(name, marks=pytest.mark.exhaustive if name in alike else ()) for name in names]


@pytest.mark.parametrize("arch", archs("sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"))
def test_blackwell_rounds_in_hardware(disassembly, arch):
    """To nearest; stochastically on two of them."""
    assert re.search(r"E2M1\.F32\.PACK_AB_MERGE_C\b(?!\.RS)", disassembly.of(arch))
    if arch in ("sm_100a", "sm_103a"):
        assert re.search(r"E2M1\.F32\.PACK_AB_MERGE_C\.RS", disassembly.of(arch))


def test_products_on_hopper_keep_their_registers(disassembly):
    """Sums, fragments and codes fill them; what is spilled would be read again in each stage."""
    assert "E2M1" not in disassembly.of("sm_90a")  # an instruction that Hopper does not have
    products = disassembly.functions("sm_90a", "many_rows6kernel|few_rows_sm906kernel")
    assert len(products) == 46 + 38 + FEW_ROWS_SM90  # of one weight, and of weights that share x
    spilling = [name for name, code in products if re.search(r"\b(LDL|STL)\b", code)]
    # a few registers of those that norm x, before the products, or combine gate and up, where sums are added
    assert all("InputE1E" in name or "OutputE1E" in name for name in spilling)


# --- order ------------------------------------------------------------------------------------------------------------


def instructions(function):
    """(text, scoreboard it sets or None, scoreboards it waits for) of each instruction of a function's disassembly.

    Bits 105 to 125 of an instruction's 128 say how it is scheduled: of these 5 to 7 which of six scoreboards it sets
    until its result is there (7: none), 11 to 16 which it waits for.
    """
    words = re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(.*?);\s*/\* 0x[0-9a-f]{16} \*/\s*/\* 0x([0-9a-f]{16}) \*/", function)
    for text, high in words:
        schedule = int(high, 16) >> 41
        sets = schedule >> 5 & 7
        yield text.strip(), None if sets == 7 else sets, {i for i in range(6) if schedule >> 11 + i & 1}


def arrivals_past_loads(function):
    """Arrivals at barriers in shared memory while a load from shared memory is still to bring its value."""
    loading, found = {}, []
    for text, sets, waits in instructions(function):
        for scoreboard in waits:
            loading.pop(scoreboard, None)
        if "SYNCS.ARRIVE" in text and loading:
            found.append((text, sorted(loading.values())))
        if re.search(r"\bLDS\b", text) and sets is not None:
            loading[sets] = text
        if re.match("BRA|EXIT|RET", text):  # without a condition: what follows is reached from elsewhere
            loading = {}
    return found


@pytest.mark.parametrize("arch", archs("sm_120a", "sm_121a"))
def test_chips_of_99_kb_have_no_code_that_fills_227(disassembly, arch):
    empty = disassembly.functions(arch, "few_rows_sm906kernel|layers_sm90")
    assert len(empty) > FEW_ROWS_SM90
    for _, code in empty:
        assert len([text for text, _, _ in instructions(code) if not re.match("NOP|BRA", text)]) <= 2


@pytest.mark.parametrize("arch", archs("sm_90a", "sm_100a", "sm_103a", "sm_110a"))
def test_few_rows_arrive_with_what_they_loaded(disassembly, arch):
    """An arrival lets a copy overwrite what was loaded, but does not wait for loads: they have to be done before.

    On an H200 an arrival behind the last load was never seen to fail by itself, only under memcheck.
    """
    functions = disassembly.functions(arch, "few_rows_sm906kernel")
    assert len(functions) == FEW_ROWS_SM90
    for _, code in functions:
        texts = [text for text, _, _ in instructions(code)]
        assert sum("SYNCS.ARRIVE" in text for text in texts) >= 8
        assert sum(re.search(r"\bLDS\b", text) is not None for text in texts) >= 50
        assert arrivals_past_loads(code) == []


def test_an_arrival_past_a_load_is_found():
    def line(at, text, sets, waits):
        high = (sets << 5 | waits << 11) << 41
        return f"        /*{at:04x}*/  {text} ;   /* 0x0000000000000000 */\n      /* 0x{high:016x} */\n"

    load, arrive = "LDS.128 R4, [R2]", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6], RZ"
    code = line(0, load, 1, 0) + line(16, "FADD R4, R4, R5", 7, 0) + line(32, arrive, 7, 0)
    assert arrivals_past_loads(code) == [(arrive, [load])]
    assert arrivals_past_loads(line(0, load, 1, 0) + line(16, "FADD R4, R4, R5", 7, 2) + line(32, arrive, 7, 0)) == []
    assert arrivals_past_loads(line(0, load, 1, 0) + line(16, arrive, 7, 4)) == [(arrive, [load])]


@pytest.mark.parametrize("arch", archs("sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"))
def test_kernels_that_begin_early_read_nothing_before_they_wait(disassembly, arch):
    """A load of what is taken for constant may move across the wait, and then reads what is still being written.

    Only products of few rows may copy weights before, and attention to codes may read lengths and copy codes, where a
    caller says that no kernel under way writes them.
    """
    waiting = [(name, code) for name, code in disassembly.functions(arch) if "ACQBULK" in code]
    assert len(waiting) >= 20
    for name, code in waiting:
        may = "LDGSTS|LDG.E.64" if "attend_codes_kernel" in name else "-"
        may = "UTMALDG" if "few_rows_sm906kernel" in name else may
        assert [access for access in early_accesses(code) if not re.match(f"(@!?U?P\\d )?({may})", access)] == []


def early_accesses(function):
    """Accesses to global memory that some way through a function comes to before it waits for the kernel before.

    Prefetches to the L2 cache are none: what that kernel writes goes through it.
    """
    lines = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);\s*/\* 0x", function)
    texts = {int(at, 16): text.strip() for at, text in lines}
    access = r"\b(LDG|LDGSTS|LD|STG|ST|ATOM|ATOMG|RED|REDG|UTMALDG|UTMASTG|UTMAREDG|UBLKCP|UBLKRED)\b"
    found, seen, reached = [], set(), [min(texts)]
    while reached:
        if (at := reached.pop()) in seen:
            continue
        seen.add(at)
        text = texts[at]
        if re.match("ACQBULK", text):  # without a condition
            continue
        if re.search(access, text):
            found.append(text)
        assert not re.search(r"\b(BRX|JMX|CALL)\b", text), "goes on elsewhere"
        if re.search(r"\b(BRA|BSSY)\b", text):  # where those that BSSY lets wait go on together
            reached.append(int(re.findall(r"0x[0-9a-f]+", text)[-1], 16))
        if not re.match(r"(BRA 0x\w+|EXIT|RET\b.*)$", text):
            reached.append(at + 16)
    return found


@pytest.mark.parametrize(
    "texts, early",
    [
        (["@P0 BRA 0x30", "ACQBULK", "EXIT", "@P1 BRA 0x50", "LDG.E R2", "ACQBULK", "STG.E R2", "EXIT"], ["LDG.E R2"]),
        (["@P0 ACQBULK", "LDG.E R2", "EXIT"], ["LDG.E R2"]),
        (["BRA P0, 0x30", "LDGSTS.E R2", "EXIT", "ACQBULK", "EXIT"], ["LDGSTS.E R2"]),
        (["BRA 0x20", "UBLKCP R2", "ACQBULK", "UBLKCP R2", "EXIT"], []),
        (["BSSY B0, 0x30", "ACQBULK", "EXIT", "UTMALDG.2D R2", "EXIT"], ["UTMALDG.2D R2"]),
    ],
)
def test_an_early_access_is_found(texts, early):
    code = "".join(f"/*{16 * i:04x}*/  {text} ;  /* 0x0000000000000000 */\n" for i, text in enumerate(texts))
    assert early_accesses(code) == early
