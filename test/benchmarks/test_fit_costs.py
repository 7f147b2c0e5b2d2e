"""benchmarks.fit_costs: constants that were planted in the times of products are found again."""

import math

import pytest

from benchmarks import fit_costs
from benchmarks.fit_costs import Machine, Run

pytestmark = pytest.mark.slow

WEIGHTS = [(4096, 4096), (14336, 8192), (1024, 4096), (7168, 2048)]
ROWS = [16, 32, 64, 128, 256, 512, 1024]
PLANTED = Machine(1.7e9, 1.3e-6)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    try:
        return fit_costs.Model(tmp_path_factory.mktemp("fit"))
    except SystemExit as error:
        pytest.skip(str(error))


def runs_of(model) -> list[Run]:
    """Every kernel by every product that it takes, in the times that the model gives them as it is."""
    runs = []
    for kernel in model.kernels:
        for n, k in WEIGHTS:
            for m in ROWS:
                if (cost := model.cost(kernel, m, n, k, 132)) is not None:
                    runs.append(Run(m, n, k, 132, kernel, PLANTED.beside + cost / PLANTED.clock))
    return runs


def test_the_header_explains_its_own_times(model):
    runs = runs_of(model)
    machine = Machine.fitted(model, runs)
    assert math.isclose(machine.clock, PLANTED.clock, rel_tol=1e-6)
    assert math.isclose(machine.beside, PLANTED.beside, rel_tol=1e-6)
    assert fit_costs.off(fit_costs.ratios(model, runs, machine)) < 1e-6
    assert "0.0% in the mean, 0.0% at most" in fit_costs.show_choices(model, runs)


@pytest.mark.parametrize(
    "name, factor",
    [
        ("kShareCycles", 1.5),
        pytest.param("stage_cycles:many_rows_sm90:128x64:shared:permuted_before", 0.8, marks=pytest.mark.exhaustive),
        pytest.param("stage_cycles:many_rows_sm90:128x256:runs:as_it_lies", 1.2, marks=pytest.mark.exhaustive),
    ],
)
def test_a_planted_constant_is_found(model, name, factor):
    model.set({name: model.header[name] * factor})
    runs = runs_of(model)
    model.set(model.header)
    fitted, freedom = fit_costs.fit(model, runs, PLANTED)
    assert math.isclose(fitted[name] / model.header[name], factor, rel_tol=0.02) and freedom[name] < fit_costs.FREEDOM
    others = [other for other in fitted if other != name and freedom[other] < 0.02]
    assert len(others) > 10
    assert all(math.isclose(fitted[other], model.header[other], rel_tol=0.03) for other in others)


def test_what_no_run_has_is_not_determined(model):
    kernel = "many_rows_sm90:128x160:runs:permuted_before"
    runs = [run for run in runs_of(model) if run.kernel != kernel]
    _, freedom = fit_costs.fit(model, runs, PLANTED, steps=1)
    assert freedom[f"stage_cycles:{kernel}"] > 0.9
    line = next(
        line for line in fit_costs.show_fit(model, runs).splitlines() if line.startswith(f"stage_cycles:{kernel}")
    )
    assert "not determined" in line


def test_a_wrong_cost_makes_wrong_choices(model):
    runs = runs_of(model)
    name = "stage_cycles:many_rows_sm90:128x64:shared:permuted_before"
    model.set({name: model.header[name] * 0.5})
    text = fit_costs.show_choices(model, runs)
    model.set(model.header)
    assert "0.0% at most" not in text and "many_rows_sm90:128x64:shared:permuted_before" in text
