"""Other people's measurements become runs like ours, or one line says what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from specdec_exporter.abtest.compare import compare
from specdec_exporter.abtest.errors import BenchError
from specdec_exporter.abtest.importing import import_csv, parse_map, read_csv, run_lines
from specdec_exporter.abtest.record import Request, Run, read_lines
from specdec_exporter.abtest.run import read
from specdec_exporter.abtest.stats import median, ratio
from specdec_exporter.abtest.table import print_comparison
from specdec_exporter.report import console

STUDY = Path(__file__).parents[1] / "../shared/data/sah2026/requests.csv"
STUDY_MAP = (
    "mode=label,prompt_id=prompt,repetition=repeat,output_valid=valid,"
    "invalid_reasons=problems,e2e_ms=e2e_ms"
)
HEADING = "label,workload,prompt,ttfo_ms,e2e_ms,completion_tokens"


def requests(text: str, mapping: str = "") -> dict[str, list[Request]]:
    return read_csv(text.splitlines(keepends=True), parse_map(mapping), "f.csv")


def test_a_column_is_what_it_is_mapped_to_or_called() -> None:
    text = "mode,workload,id,n,ttfo_ms,e2e_seconds,completion_tokens,stop,other\nar,w,p,3,80,1.08,101,length,x\n"
    ((request,),) = requests(text, "mode=label, id=prompt, n=repeat, stop=finish_reason").values()
    assert request == Request(
        workload="w",
        prompt="p",
        repeat=3,
        first_output_seconds=0.08,
        end_seconds=1.08,
        completion_tokens=101,
        finish_reason="length",
    )
    assert request.output_speed == pytest.approx(100)


def test_rows_without_a_number_of_their_own_are_counted_by_side_and_prompt() -> None:
    rows = "".join(f"{label},w,p,80,1080,101\n" for label in ("a", "b", "a"))
    runs = requests(f"{HEADING}\n{rows}")
    assert {label: [r.repeat for r in rs] for label, rs in runs.items()} == {"a": [1, 2], "b": [1]}


def test_validity_is_taken_over_with_its_reason() -> None:
    rows = "a,w,p,80,1080,101,{}\n"
    text = f"{HEADING},valid,problems\n" + "".join(
        rows.format(told) for told in ("True,", "false,no answer", "0,", ",", "true,a remark")
    )
    (found,) = requests(text).values()
    assert [r.problems for r in found] == [(), ("no answer",), ("said to be invalid",), (), ()]


def test_an_empty_cell_is_not_known() -> None:
    ((request,),) = requests(f"{HEADING}\na,w,p,,1080,\n").values()
    assert (request.first_output_seconds, request.completion_tokens) == (None, None)


@pytest.mark.parametrize(
    ("text", "mapping", "said"),
    [
        ("", "", "f.csv: nothing is mapped to label; give --map COLUMN=label"),
        (f"{HEADING}\n", "", "f.csv: no rows in it"),
        (f"{HEADING}\n", "mode=label", "f.csv: no column 'mode'; there are label, workload"),
        (f"{HEADING}\na,w,p,x,1080,101\n", "", "f.csv:2: column ttfo_ms: "),
        (f"{HEADING}\na,w,p,nan,1080,101\n", "", "f.csv:2: column ttfo_ms: nan is no time"),
        (f"{HEADING}\na,w,p,80,1080,10.5\n", "", "f.csv:2: column completion_tokens: 10.5 is no"),
        (
            f"{HEADING},valid\na,w,p,80,1080,9,maybe\n",
            "",
            "f.csv:2: column valid: 'maybe' is neither",
        ),
        (f"{HEADING}\na,w,,80,1080,101\n", "", "f.csv:2: no prompt"),
        (HEADING.replace("e2e_ms", "end"), "", "f.csv: nothing is mapped to e2e_ms"),
        ("a", "a", "--map: 'a' is not column=field"),
        ("a", "a=speed", "--map: no field 'speed'; there are label, workload"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_in_one_line(text: str, mapping: str, said: str) -> None:
    with pytest.raises(BenchError) as caught:
        requests(text, mapping)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_each_label_becomes_a_file_that_compare_reads(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    rows = "".join(f"{label},w,p,80,1080,101\n" for label in ("a", "b/../c"))
    file.write_text(f"{HEADING}\n{rows}")
    written = import_csv(file, {}, tmp_path / "out")
    assert [(path.name, count) for path, count in written] == [
        ("x.a.jsonl", 1),
        ("x.b_.._c.jsonl", 1),
    ]
    a, b = (read(path) for path, _ in written)
    assert (a.label, b.label) == ("a", "b/../c")
    (warning,) = compare(a, b).warnings
    assert "were imported: whether conditions were equal is not known" in warning


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="No such file"):
        import_csv(tmp_path / "none.csv", {}, tmp_path)
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(BenchError, match="not CSV in UTF-8"):
        import_csv(tmp_path / "x.csv", {}, tmp_path)


@pytest.fixture(scope="module")
def study() -> tuple[Run, Run]:
    """Sah 2026, arXiv 2609.35188: 360 requests on one A10G, published, and not part of this project."""
    if not STUDY.exists():
        pytest.skip("the published study is not here")
    with STUDY.open(encoding="utf-8", newline="") as lines:
        runs = read_csv(lines, parse_map(STUDY_MAP), STUDY.name)
    normal, mtp = (
        read_lines(run_lines(label, runs[label], STUDY.name), label) for label in ("normal", "mtp")
    )
    return normal, mtp


def test_a_published_study_gives_its_published_figures(
    study: tuple[Run, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    print_comparison(compare(*study), console())
    printed = capsys.readouterr().out
    for workload, speeds in {
        "plain_text": "97.46->192.80 (1.98x)",
        "reasoning_intensive": "96.60->204.70 (2.12x)",
        "tool_calling": "97.26->204.98 (2.11x)",
    }.items():
        (row,) = (
            line for line in printed.splitlines() if line.startswith(workload) and "->" in line
        )
        assert f"tokens/s         {speeds}" in row
    assert "per-prompt ratios 1.91-2.19\n" in printed
    assert "valid 177/180 with normal and 172/180 with mtp\n" in printed


def test_a_published_study_answers_sooner_by_what_it_says(study: tuple[Run, Run]) -> None:
    """10.0 to 14.2 % by prompt."""
    normal, mtp = (
        {
            prompt: median(
                [r.first_output_seconds or 0.0 for r in run.requests if r.prompt == prompt]
            )
            for prompt in {r.prompt for r in run.requests}
        }
        for run in study
    )
    sooner = [1 - (ratio(normal[prompt], mtp[prompt]) or 0.0) for prompt in normal]
    assert (min(sooner), max(sooner)) == pytest.approx((0.100, 0.142), abs=0.0005)


def test_a_published_study_has_its_invalid_answers_in_its_figures(study: tuple[Run, Run]) -> None:
    reasoning = next(w for w in compare(*study).workloads if w.workload == "reasoning_intensive")
    assert (reasoning.a.valid, reasoning.b.valid, reasoning.a.requests) == (57, 52, 60)
    assert (reasoning.a.cut, reasoning.b.cut) == (1, 4)
    assert reasoning.all.output_speed.b == pytest.approx(204.70, abs=0.005)
    assert reasoning.valid.output_speed.b == pytest.approx(203.81, abs=0.005)
