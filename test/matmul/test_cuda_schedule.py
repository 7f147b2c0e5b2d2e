"""runs.h and plan.h of csrc/cuda/matmul/many_rows_sm90, compiled for the host: all segments, with no GPU needed."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
CSRC = Path(__file__).parents[2] / "nvfp4_tensor" / "csrc"
PROGRAM = r"""
#include "cuda/host/without_nvcc.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/matmul/describe.h"
using namespace nvfp4;
using namespace nvfp4::many_rows;

// What is wrong with a division: stages not computed once, blocks that disagree on who has a tile, slots for sums of
// several tiles, blocks that wait for too many which are started after them.
template <bool kGrouped>
int faults(Work work, int tiles, int blocks, int slots) {
  std::vector<int> computed(tiles * work.steps), parts(tiles), left(slots, -1);
  std::vector<Meeting> meetings(tiles);
  gridDim.x = blocks;
  work.prepare();
  int wrong = 0;
  for (int block = 0; block < blocks; ++block) {
    blockIdx.x = block;
    Runs<kGrouped> runs(work);
    for (Segment s; runs.next(s);) {
      if (s.tile < 0 || s.tile >= tiles || s.begin < 0 || s.end > work.steps || s.begin >= s.end) return ++wrong;
      for (int step = s.begin; step < s.end; ++step) ++computed[s.tile * work.steps + step];
      if (s.begin == 0 && s.end == work.steps) continue;
      const Meeting m = runs.meeting(s);
      const bool leaves_all = m.rank >= m.finishers, goes_on = s.begin > 0 && s.end == work.steps;
      wrong += m.rank < 0 || m.rank >= m.all || (m.rank == 0) != (s.begin == 0) || (goes_on && !leaves_all);
      wrong += m.finishers < 1 || m.finishers > work.most_finishers || m.finishers >= m.all;
      wrong += m.slot(m.rank) % blocks != block;
      if (parts[s.tile]++ == 0) meetings[s.tile] = m;
      const Meeting& known = meetings[s.tile];
      wrong += known.finishers != m.finishers || known.slot(0) != m.slot(0) || known.slot(1) != m.slot(1);
      if (!leaves_all && m.finishers == 1) continue;  // adds what is left to it
      if (m.slot(m.rank) >= slots) return ++wrong;
      wrong += left[m.slot(m.rank)] != -1, left[m.slot(m.rank)] = s.tile;
    }
  }
  for (int times : computed) wrong += times != 1;
  for (int tile = 0; tile < tiles; ++tile) {
    if (parts[tile] == 0) continue;
    const Meeting& m = meetings[tile];
    wrong += parts[tile] != m.all;
    for (int rank = m.finishers > 1 ? 0 : 1; rank < m.all; ++rank) wrong += left[m.slot(rank)] != tile;
    for (int rank = 1; rank < m.all; ++rank) wrong += m.slot(rank) % blocks != m.slot(0) % blocks - rank;
  }
  return wrong;
}

// Likewise where blocks share tiles: each computes its part, and none is without one.
int faults_of_parts(int tiles, int steps, int sharers) {
  Work work{};
  work.most_finishers = min(sharers, 2);
  work.steps = steps, work.sharers = sharers, work.row_tiles = work.token_tiles = work.token_group = work.runs = 1;
  work.prepare();
  std::vector<int> computed(tiles * steps);
  int wrong = 0;
  for (unsigned block = 0; block < unsigned(tiles * sharers); ++block) {
    blockIdx.x = block;
    Part part(work);
    Segment s, behind;
    wrong += !part.next(s) || s.begin >= s.end || s.tile != int(block) / sharers || part.next(behind);
    const Meeting m = part.meeting();
    wrong += m.slot(m.rank) != int(block) || m.finishers != work.most_finishers || m.all != sharers;
    wrong += m.slot(0) != s.tile * sharers || m.slot(sharers - 1) != s.tile * sharers + sharers - 1;
    for (int step = s.begin; step < s.end; ++step) ++computed[s.tile * steps + step];
  }
  for (int times : computed) wrong += times != 1;
  return wrong;
}

// A plan fits the machine and the scratch that it asks for, and what it divides is computed once.
int faults_of_plans(const Tiling& tiling, int most_blocks) {
  int wrong = 0;
  const Plan shared = Plan::of_sharers(tiling, most_blocks);
  wrong += tiling.steps == 1 && tiling.tiles <= most_blocks && shared.cost >= INT64_MAX / 2;
  if (shared.cost < INT64_MAX / 2) {
    wrong += shared.blocks > most_blocks || shared.sharers > kMostSharers;
    wrong += shared.sharers > 1 && shared.sharers * 16 > most_blocks;  // those that wait for each other
    wrong += shared.sharers == 1 && (tiling.steps > 1 || shared.most_finishers(most_blocks) != 1 || shared.slots() > 0);
    wrong += faults_of_parts(tiling.tiles, tiling.steps, shared.sharers);
    wrong += shared.flags_bytes() < 8L * shared.slots() * kMostSharers * (tiling.rows / 64);
  } else {
    wrong += shared.sharers > 1;
  }
  const Plan runs = Plan::of_runs(tiling, most_blocks);
  wrong += runs.blocks < 1 || runs.blocks > most_blocks || runs.whole_tiles + runs.cut_tiles != tiling.tiles;
  Work work{};
  work.row_tiles = work.token_tiles = work.token_group = work.sharers = 1;
  work.steps = tiling.steps, work.whole_tiles = runs.whole_tiles, work.cut_tiles = runs.cut_tiles;
  work.runs = runs.blocks, work.most_finishers = runs.most_finishers(most_blocks);
  wrong += work.most_finishers < 1 || work.most_finishers > most_sharers(most_blocks);
  wrong += faults<false>(work, tiling.tiles, runs.blocks, runs.slots());
  const Plan groups = Plan::of_groups(tiling, most_blocks);
  wrong += groups.blocks > most_blocks || groups.blocks > tiling.tiles;
  const Division division(tiling.tiles, tiling.steps, groups.blocks, groups.cut_cost);  // as the device divides them
  work.whole_tiles = division.whole_tiles, work.cut_tiles = division.cut_tiles, work.runs = division.runs;
  work.most_finishers = groups.most_finishers(most_blocks);
  wrong += faults<true>(work, tiling.tiles, groups.blocks, groups.slots());
  for (const Plan& plan : {runs, groups}) {
    wrong += plan.flags_bytes() < 8L * plan.slots() * kMostSharers * (tiling.rows / 64);
  }
  for (const Plan& plan : {shared, runs, groups}) {
    const int64_t sums = 4L * plan.slots() * tiling.rows * tiling.tokens;
    wrong += plan.x_at() != plan.flags_bytes() + sums || plan.flags_bytes() % 256 != 0 || plan.cost <= 0;
  }
  return wrong;
}

int main(int, char** arguments) {
  if (arguments[1][0] == 'c') {  // a choice in words; which kernels fit
    int n[8];
    for (int i = 0; i < 8; ++i) n[i] = std::atoi(arguments[2 + i]);
    const ProductSize size = {n[0], n[1], n[2], n[3], n[0] * n[1], false};
    const Fits fits = {n[4] != 0, n[5] != 0};
    const Machine machine = {n[6], n[7], 0};
    const Choice choice = choose(size, fits, machine.multiprocessors, [] { return true; });
    std::puts(describe(choice, size, fits, "bfloat16", machine).c_str());
    return 0;
  }
  const bool as_many_runs_as_blocks = arguments[1][0] == '1';  // the fault that was: a GPU waited for ever
  const int all_blocks[] = {1, 2, 3, 7, 64, 96, 114, 132, 148, 188};
  long divisions = 0, cut = 0, wrong = 0;
  for (int blocks : all_blocks)
    for (int steps : {1, 2, 3, 4, 5, 6, 8, 12, 16, 31, 32, 56, 64, 112, 128})
      for (int tiles = 0; tiles <= 3 * blocks + 5; ++tiles)
        for (int cut_cost : {0, 1, 3, 4, 6, 12, 1000}) {
          const Division division(tiles, steps, blocks, cut_cost);
          Work work{};
          work.row_tiles = work.token_tiles = work.token_group = work.sharers = 1;
          work.steps = steps, work.whole_tiles = division.whole_tiles, work.cut_tiles = division.cut_tiles;
          work.runs = as_many_runs_as_blocks ? blocks : division.runs;
          work.most_finishers = divisions % 2 ? kMostSharers : 1;
          ++divisions, cut += division.cut_tiles > 0, wrong += faults<true>(work, tiles, blocks, 2 * blocks) > 0;
          if (work.runs != blocks) continue;
          wrong += faults<false>(work, tiles, blocks, 2 * blocks) > 0;  // what other products do
        }
  for (int sharers = 2; sharers <= kMostSharers; ++sharers)
    for (int steps = sharers; steps <= 130; ++steps)
      for (int tiles : {1, 2, 5, 16, 60}) ++divisions, wrong += faults_of_parts(tiles, steps, sharers) > 0;
  for (int blocks : all_blocks)
    for (int rows : {128, 256})
      for (int tokens : {16, 32, 64, 96, 128, 160, 192, 256})
        for (int steps : {1, 2, 3, 5, 8, 28, 57, 128, 500})
          for (int tiles : {1, 2, 3, 7, 16, 31, 32, 33, 64, 65, 112, 131, 132, 133, 264, 300})
            for (int row_tiles : {1, (tiles + 3) / 4, tiles}) {
              const Tiling tiling = {rows, tokens, tiles, steps, 8 * tokens, row_tiles, 4};
              ++divisions, wrong += faults_of_plans(tiling, blocks) > 0;
            }
  for (int value : {1, 2, 3, 5, 7, 20, 64, 112, 127, 132, 1000, 65535, 65536, 1 << 20, (1 << 30) + 1, INT32_MAX}) {
    const Divisor by = Divisor::of(value);
    for (long times = 0; times < 2000; ++times) {
      const long most = INT32_MAX / value, multiple = times < 1000 ? times : most - times % 1000;
      for (long n : {multiple * value - 1, multiple * value, multiple * value + value / 2}) {
        if (n >= 0 && n <= INT32_MAX) wrong += by.quotient(int(n)) != n / value;
      }
    }
  }
  for (int row_tiles : {1, 3, 28, 112})
    for (int token_tiles : {1, 2, 4, 5, 7, 16, 33})
      for (int group : {1, 2, 3, 4}) {
        if (group > token_tiles) continue;
        Work work{};
        work.row_tiles = row_tiles, work.token_tiles = token_tiles, work.token_group = group;
        work.steps = work.runs = work.sharers = 1;
        work.prepare();
        int tile = 0;
        for (int expert = 0; expert < 3; ++expert)
          for (int first = 0; first < token_tiles; first += group)
            for (int row = 0; row < row_tiles; ++row)
              for (int token = first; token < min(first + group, token_tiles); ++token, ++tile)
                for (const Tile& at : {tile_at<false>(work, tile), tile_at<true>(work, tile)}) {
                  wrong += at.expert != expert || at.token_tile != token || at.row_tile != row;
                }
      }
  std::printf("%ld %ld %ld\n", divisions, cut, wrong);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "schedule.cpp").write_text(PROGRAM)
    command = [COMPILER, "-std=c++17", "-O2", "-w", f"-I{CSRC}", "schedule.cpp", "-o", "schedule"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "schedule"


def run(program, *arguments: str) -> list[int]:
    return [int(n) for n in subprocess.run([program, *arguments], capture_output=True, check=True).stdout.split()]


def test_each_stage_is_computed_once_and_each_sum_waited_for_is_left(program):
    divisions, cut, wrong = run(program, "0")
    assert divisions > 200_000 and cut > 50_000 and wrong == 0


def test_a_run_for_each_block_would_wait_for_ever(program):
    """The fault that this looks for, planted: runs of less than a stage, some of them empty."""
    assert run(program, "1")[2] > 1_000


# --- which kernel, in words -------------------------------------------------------------------------------------------


def said(program, size, fits=(1, 1), machine=(90, 132)) -> str:
    """What NVFP4_TENSOR_PRINT_PLANS prints of a product (M, N, K) on a machine, by the kernels that fit."""
    arguments = ["c", "1", *map(str, (*size, *fits, *machine))]
    return subprocess.run([program, *arguments], capture_output=True, check=True, text=True).stdout.rstrip("\n")


@pytest.mark.parametrize(
    "size, fits, machine, kernel, why",
    [
        ((1, 4096, 4096), (1, 1), (90, 132), "few_rows_sm90, split-K over 1 blocks of 16 warps", "at most 8 rows of x"),
        ((8, 1024, 28672), (1, 1), (90, 132), "few_rows_sm90, split-K over 4 blocks of 14 warps", "at most 8"),
        ((8, 4000, 4096), (1, 0), (90, 132), "few_rows", "at most 8 rows of x"),
        ((12, 4000, 4096), (1, 0), (90, 132), "many_rows_sm90:", "that Hopper's few-rows kernel does not take"),
        ((12, 16384, 4096), (1, 0), (90, 132), "few_rows", "a large w"),
        ((16, 1024, 8192), (1, 1), (90, 132), "few_rows_sm90", "by cost"),
        ((16, 28672, 8192), (1, 1), (90, 132), "few_rows_sm90", "no room for tiles of 16"),
        ((128, 64, 64), (1, 1), (90, 132), "many_rows_sm90:128x16:shared:permuted_in_copy, 8 whole tiles on 8", "more"),
        ((17, 4096, 4096), (1, 1), (90, 132), "many_rows_sm90:128x32:shared:permuted_in_copy, split-K", "more than 16"),
        ((64, 4096, 4096), (0, 1), (100, 148), "few_rows_sm90, split-K over 1 blocks of 16 warps, 16 rows", "no wgmma"),
        ((64, 4096, 4096), (0, 0), (80, 108), "few_rows, 16 rows of x at a time", "no wgmma"),
        ((65, 4096, 4096), (0, 0), (80, 108), "decoded, then a dense product", "no wgmma"),
        ((4096, 512, 3584), (1, 1), (90, 132), "decoded, then a dense product", "by cost"),
        ((128, 28672, 4096), (1, 1), (90, 132), "many_rows_sm90:128x128:runs:permuted_before, stream-K", "more"),
    ],
)
def test_the_choice_is_said(program, size, fits, machine, kernel, why):
    line = said(program, size, fits, machine)
    m, n, k = size
    product = f"nvfp4.matmul x ({m}, {k}) bfloat16, w ({n}, {k}), sm_{machine[0]} with {machine[1]} multiprocessors: "
    assert line.startswith(product + kernel)
    assert why in re.search(r" \(([^()]*)\)(?:; cycles|$)", line).group(1)


def test_the_cheapest_of_the_costs_that_are_said_serves(program):
    for size in ((16, 4096, 4096), (9, 14336, 8192), (16, 1024, 8192), (1024, 512, 3584)):
        line = said(program, size)
        costs = {name: int(cycles) for name, cycles in re.findall(r"([\w:]+) (\d+)(?:,|$)", line.split("cycles: ")[1])}
        assert len(costs) == 2
        assert f"multiprocessors: {min(costs, key=costs.__getitem__)}" in line
