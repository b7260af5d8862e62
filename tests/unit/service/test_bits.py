"""The split is invisible to the last bit: the C kernels' logits, KV and tokens, however they are served."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from bits import (
    BATCH_SIZES,
    Record,
    Way,
    all_ways,
    batch_sizes,
    covering,
    serve,
    with_families,
)
from ferry import Ferry
from reference import logits64, prompts

from pagerelay.common.config import cache_dir
from pagerelay.common.model.runner import ModelFacts, ModelRunner, read_facts
from pagerelay.kernels.cpu_build import KernelUnavailable
from pagerelay.kernels.cpu_native import INSTRUCTION_SETS
from pagerelay.kernels.cpu_ops import CpuOps

NUM_PROMPTS = 200
NUM_TOKENS = 4
MOST_RELATIVE_ERROR = 1e-5


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def instruction_sets() -> list[str]:
    """Those of this machine, the best first."""
    found = []
    for name in INSTRUCTION_SETS:
        try:
            CpuOps(cache_dir() / "kernels", 1, name)
            found.append(name)
        except KernelUnavailable as error:
            reason = error.reason
    if not found:
        pytest.skip(reason)
    return found


class Model:
    """A model folder, its prompts, and the runner for a way; it holds one at a time."""

    def __init__(self, folder: Path, num_prompts: int = NUM_PROMPTS) -> None:
        self.folder = folder
        self.facts: ModelFacts = read_facts(folder, None)
        self.prompts = with_families(prompts(folder, num_prompts, longest=300))
        self._sizes = batch_sizes()
        self._kernels: tuple[str, int, str] | None = None
        self._runner: ModelRunner

    def serve(
        self,
        way: Way,
        look: Callable[[int, int, torch.Tensor], None] | None = None,
        ids: dict[int, list[int]] | None = None,
    ) -> Record:
        kernels = (way.instruction_set, way.threads, way.weights)
        if kernels != self._kernels:
            ops = CpuOps(
                cache_dir() / "kernels",
                way.threads,
                way.instruction_set,
                int8_weights=way.weights == "int8",
            )
            self._runner, self._kernels = ModelRunner(self.folder, ops), kernels
        return serve(way, self._runner, self.facts, self.prompts, NUM_TOKENS, self._sizes, look, ids)

    @contextmanager
    def only(self, count: int) -> Iterator[None]:
        """The first ``count`` prompts."""
        self.prompts, kept = self.prompts[:count], self.prompts
        yield
        self.prompts = kept


@pytest.fixture(scope="module")
def tiny(tiny_dir: Path) -> Model:
    return Model(tiny_dir)


@pytest.fixture(scope="module")
def smollm(smollm_dir: Path) -> Model:
    return Model(smollm_dir, int(os.environ.get("EXACT_PROMPTS", NUM_PROMPTS)))


def check(model: Model, ways: Sequence[Way], best: str) -> None:
    """Serves the prompts in all ``ways`` and compares each with one undisturbed engine's record.

    Prints a line a way.
    """
    references: dict[Way, Record] = {}
    wrong: list[str] = []
    sizes: set[int] = set()
    compared = 0
    for way in ways:
        reference = way.reference(best)
        if reference not in references:
            began = time.monotonic()
            references[reference] = record = model.serve(reference)
            assert len(record.logits) == len(model.prompts) * NUM_TOKENS
            assert len(record.kv) == len(record.ids) == len(model.prompts)
            print(f"\n{time.monotonic() - began:6.1f} s  {reference}: the reference", flush=True)
        began = time.monotonic()
        record = model.serve(way, ids=references[reference].ids)
        assert (record.num_accepted > 0) == way.guessed
        assert (record.num_recovered > 0) == way.recovered
        if way.prefix_cache and way.placed != "colocated":
            assert record.num_cached > 0
        sizes |= record.batch_sizes
        differences = references[reference].differences(record)
        compared += record.num_compared
        verdict = f"{len(differences)} differences" if differences else "equal"
        print(f"{time.monotonic() - began:6.1f} s  {way}: {verdict}", flush=True)
        if differences:
            wrong.append(f"{way}: {', '.join(differences[:5])} …")
    print(f"{len(ways)} ways, {compared} comparisons")
    assert not wrong, "\n".join(wrong)
    if len(model.prompts) >= NUM_PROMPTS:
        assert sizes >= set(BATCH_SIZES)


@pytest.mark.timeout(600)
def test_no_way_of_serving_changes_a_bit(tiny: Model, instruction_sets: list[str]) -> None:
    """Any two settings meet."""
    check(tiny, covering(all_ways(instruction_sets)), instruction_sets[0])


@pytest.mark.exact
@pytest.mark.timeout(3600)
def test_no_way_of_serving_changes_a_bit_any_three_settings(tiny: Model, instruction_sets: list[str]) -> None:
    check(tiny, covering(all_ways(instruction_sets), strength=3), instruction_sets[0])


@pytest.mark.exact
@pytest.mark.timeout(7200)
def test_no_way_of_serving_changes_a_bit_real_model(smollm: Model, instruction_sets: list[str]) -> None:
    check(smollm, covering(all_ways(instruction_sets)), instruction_sets[0])


OTHER_HOST = """
import sys
from pathlib import Path
from test_bits import Model, Way

model = Model(Path(sys.argv[1]))
with model.only(40):
    print(model.serve(Way(instruction_set="avx2", placed="tcp", batched=True)).digest())
"""


@pytest.mark.exact
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_torch_has_the_same_bits_on_lesser_processors(
    tiny: Model, instruction_sets: list[str], capability: str
) -> None:
    """What torch and its libraries still compute (rotary angles, residual sums) on a host without AVX-512."""
    tests = Path(__file__).parents[2]
    path = (str(tests / "helpers"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    found = subprocess.run(
        [sys.executable, "-c", OTHER_HOST, str(tiny.folder)],
        env=os.environ
        | {
            "ATEN_CPU_CAPABILITY": capability,
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "PYTHONPATH": ":".join(path),
        },
        check=True,
        capture_output=True,
        text=True,
    )
    with tiny.only(40):
        here = tiny.serve(Way(instruction_set=instruction_sets[0]))
    assert found.stdout.strip() == here.digest()


@pytest.mark.parametrize("bit", [0, 22])
def test_one_wrong_bit_of_kv_is_noticed(
    tiny: Model, instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch, bit: int
) -> None:
    """The comparison is as sharp as it says: one bit of one shipped number."""
    honest, done = Ferry.copy, []

    def copy(ferry: Ferry, lease: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        honest(ferry, lease, sources, targets)
        if not done:
            done.append(lease)
            ferry.target.blocks[targets[0], bit // 8] ^= 1 << bit % 8

    monkeypatch.setattr(Ferry, "copy", copy)
    way = Way(instruction_set=instruction_sets[0], placed="shm")
    with tiny.only(3):
        differences = tiny.serve(way.reference(instruction_sets[0])).differences(tiny.serve(way))
    assert done
    assert differences[0] == "kv of 0"
    assert all(f"of {number}" not in " ".join(differences) for number in (1, 2))


def check_error(model: Model, best: str) -> float:
    """Largest relative error of a row of logits, ‖ours − fp64‖ / ‖fp64‖, over all prompts and tokens."""
    reference = logits64(model.folder)
    rows: dict[int, list[torch.Tensor]] = {}
    errors: list[float] = []

    def look(number: int, length: int, logits: torch.Tensor) -> None:
        prompt, mine = model.prompts[number], rows.setdefault(number, [])
        assert length == len(prompt) + len(mine)
        mine.append(logits)
        if len(mine) == NUM_TOKENS:
            tokens = prompt + [int(row.argmax()) for row in mine[:-1]]
            exact = reference(tokens, NUM_TOKENS)
            error = (torch.stack(rows.pop(number)).double() - exact).norm(dim=-1) / exact.norm(dim=-1)
            errors.extend(error.tolist())

    model.serve(Way(instruction_set=best), look)
    assert len(errors) == len(model.prompts) * NUM_TOKENS
    errors.sort()
    print(
        f"\n{len(errors)} rows against fp64: median {errors[len(errors) // 2]:.2g}, largest {errors[-1]:.2g}"
    )
    return errors[-1]


@pytest.mark.timeout(600)
def test_logits_are_those_of_transformers_in_fp64(tiny: Model, instruction_sets: list[str]) -> None:
    assert check_error(tiny, instruction_sets[0]) <= MOST_RELATIVE_ERROR


@pytest.mark.exact
@pytest.mark.timeout(3600)
def test_logits_are_those_of_transformers_in_fp64_real_model(
    smollm: Model, instruction_sets: list[str]
) -> None:
    assert check_error(smollm, instruction_sets[0]) <= MOST_RELATIVE_ERROR
