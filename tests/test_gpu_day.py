"""The GPU day without a GPU: a dry run of all parts, and what becomes of items that go wrong."""

import json
import os
import signal
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent
sys.path.append(str(TESTS / "gpu"))

import bare_llama  # noqa: E402 - found by the line above
import gpu_about  # noqa: E402
import gpu_parts  # noqa: E402
import gpu_profiling  # noqa: E402
import gpu_pytest  # noqa: E402
import gpu_runner  # noqa: E402
import gpu_table  # noqa: E402
import gpu_waiting  # noqa: E402
from gpu_items import Item, NotRunError, Setting, check  # noqa: E402

from kenotron_dist import Axis  # noqa: E402
from kenotron_models import Build, Context, LayerStack, build_decoder  # noqa: E402
from kenotron_models.families import LlamaConfig  # noqa: E402

OPTIONAL = {"transformers", "liger_kernel", "torchtitan", "triton"}
"""Contestants that need not be there."""


def day(*arguments, cwd, **options):
    command = [sys.executable, str(TESTS / "gpu_day.py"), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, timeout=280, check=False, **options
    )


def records(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_dry_run_of_all_parts_leaves_no_item_out_and_none_fails(tmp_path):
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = day("all", "--out", tmp_path / "out", "--dry", cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    files = sorted((tmp_path / "out").iterdir())
    assert [file.stem for file in files] == sorted(gpu_parts.PARTS) and len(files) <= 8
    for name, part in gpu_parts.PARTS.items():
        header, *found = records(tmp_path / "out" / f"{name}.jsonl")
        assert header["dry"] and {"date", "commit", "hardware", "versions"} <= {*header["header"]}
        assert sorted(each["item"] for each in found) == sorted(each.name for each in part.items)
        for each in found:
            gone = each.get("reason", "").partition(" cannot be imported here")[0].split(", ")
            reasoned = each.get("reason", "").startswith("needs a GPU: ") or {*gone} <= OPTIONAL
            assert each["status"] == "ok" or (each["status"] == "not run" and reasoned), each
            assert each["part"] == name and each["seconds"] >= 0
            assert each["status"] != "ok" or each["result"], each
    before = (TESTS / "GPU.md").read_bytes()
    kept = day("table", "out", cwd=tmp_path)
    assert kept.returncode == 2
    assert "out holds nothing measured on a GPU: GPU.md stays as it is" in kept.stderr
    assert (TESTS / "GPU.md").read_bytes() == before
    made = day("table", "out", "--to", "t.md", cwd=tmp_path)
    assert made.returncode == 0 and "0 items measured on a GPU" in made.stdout
    assert gpu_table.NOTHING in (tmp_path / "t.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["prob", "--out", "x"], "unknown part 'prob': choose one of probe, right"),
        (["probe"], "--out DIR is missing: name the folder for the records"),
        (["probe", "x", "--out", "y"], "unexpected argument 'x': probe takes --out DIR"),
        (["probe", "--out", "file/x"], "file/x cannot be written: Not a directory"),
        (["probe", "--out", "x", "--minutes", "0"], "--minutes 0 is not positive"),
        (["probe", "--out", "x"], "there is no GPU here: add --dry for toy sizes on the CPU"),
        (["table"], "table needs the folder with the records: gpu_day.py table DIR"),
        (["table", "nowhere"], "nowhere is not a folder: name the one that --out named"),
        (["table", "broken"], "probe.jsonl, line 2, is not a record of this program"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, told, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/probe.jsonl").write_text('{"header": {}, "dry": true}\nno\n')
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = day(*arguments, cwd=tmp_path, env=environ)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("gpu_day.py: ") and done.stderr.count("\n") == 1
    assert told in done.stderr


def test_help_names_all_parts_and_what_comes_back(tmp_path):
    text = day("--help", cwd=tmp_path).stdout
    assert all(f"  {name} " in text for name in gpu_parts.PARTS)
    assert "exit status: 0" in text and "COMMIT" in text


def steady(setting):
    yield {"a": 1.23456789, "device": setting.device}
    yield {"b": {"nan": float("nan")}}


def failing(setting):
    yield {"before": 1}
    check(False, "2 is not 3")


def dying(setting):
    yield {"before": 2}
    os.write(2, b"last words\n")
    os.kill(os.getpid(), signal.SIGKILL)


def stuck(setting):
    yield {"before": 3}
    os.write(1, b"still here\n")
    subprocess.run(["sleep", "300"], check=False)


def absent(setting):
    raise NotRunError("there is no tool")
    yield {}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_item_that_goes_wrong_is_recorded_and_ends_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_runner, "DRY_SECONDS", 2.0)
    items = [Item(body.__name__, 9, body) for body in (failing, dying, stuck, absent, steady)]
    items += [
        Item("gpu", 9, steady, gpu="it is a test"),
        Item("module", 9, steady, needs=("torch", "no_such_module")),
    ]
    written = []
    setting = Setting("cpu", True, tmp_path)
    found = gpu_runner.run_part("probe", items, setting, written.append, seconds=100, workers=3)
    assert found == written and not list(tmp_path.iterdir())
    by_name = {each["item"]: each for each in found}
    assert by_name["steady"]["status"] == "ok"
    assert by_name["steady"]["result"] == {"a": 1.23457, "device": "cpu", "b": {"nan": "nan"}}
    assert by_name["failing"]["status"] == "failed"
    assert by_name["failing"]["result"] == {"before": 1}
    assert by_name["failing"]["error"].endswith("AssertionError: 2 is not 3")
    assert by_name["dying"]["status"] == "failed" and by_name["dying"]["result"] == {"before": 2}
    assert by_name["dying"]["error"] == "its process ended with SIGKILL\nlast words"
    assert by_name["stuck"]["status"] == "timeout" and by_name["stuck"]["result"] == {"before": 3}
    assert by_name["stuck"]["error"] == "ended after 2 s\nstill here"
    assert by_name["absent"]["reason"] == "there is no tool"
    assert by_name["gpu"]["reason"] == "needs a GPU: it is a test"
    assert by_name["module"]["reason"] == "no_such_module cannot be imported here"
    assert {by_name[name]["status"] for name in ("absent", "gpu", "module")} == {"not run"}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_run_that_is_stopped_leaves_no_item_on_the_device(tmp_path):
    seen = tmp_path / "pid"

    def started(setting):
        seen.write_text(str(os.getpid()))
        yield from stuck(setting)

    def stop(_):
        raise SystemExit(143)

    items = [Item("started", 9, started), Item("absent", 9, absent)]
    setting = Setting("cpu", True, tmp_path)
    with pytest.raises(SystemExit):
        gpu_runner.run_part("probe", items, setting, stop, seconds=100, workers=2)
    if seen.exists():  # it may have been ended before its first line
        with pytest.raises(ProcessLookupError):
            os.kill(int(seen.read_text()), 0)


def test_items_beyond_the_time_of_their_part_are_not_started(tmp_path):
    setting = Setting("cpu", False, tmp_path)
    items = [Item("late", 9, steady)]
    (late,) = gpu_runner.run_part("probe", items, setting, lambda _: None, seconds=1)
    assert late["reason"] == "the time of its part was used up" and late["status"] == "not run"


def raising():
    raise ValueError("no good")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_is_called_apart_answers_or_raises():
    assert gpu_runner.call_apart(os.getpid) != os.getpid()
    with pytest.raises(RuntimeError, match="ValueError: no good"):
        gpu_runner.call_apart(raising)
    with pytest.raises(RuntimeError, match="its process died"):
        gpu_runner.call_apart(partial(os._exit, 3))


def write(folder, part, *lines):
    for line in lines:
        gpu_runner.append(folder / f"{part}.jsonl", line)


def header(date, *, dry=False):
    hardware = {"gpu": "NVIDIA H200", "gpu_memory_gib": 139.8, "cores": 16, "memory_gib": 128}
    about = {"date": date, "commit": "c" * 40, "hardware": hardware, "versions": {"torch": "2.11"}}
    return {"part": "probe", "dry": dry, "argv": [], "header": about}


def entry(item, status="ok", **more):
    return {"part": "probe", "item": item, "status": status, "seconds": 1.0, **more}


def test_the_table_has_what_was_seen_where_and_when(tmp_path):
    rows = {"GB/s": 4321.98765, "M=1": {"ms": 0.12345, "why": "a|b"}, "M=2": {"ms": 2, "why": ""}}
    write(
        tmp_path, "probe",
        header("dry day", dry=True), entry("copy", result={"GB/s": 1}),
        header("day 1"), entry("copy", result={"GB/s": 2}), entry("old", result={"x": 7}),
        header("day 2"), entry("copy", result=rows), entry("old", "not run", reason="no time"),
        entry("bad", "failed", result={}, error="Traceback\nKeyError: 'x'"),
    )  # fmt: skip
    assert gpu_table.write_table(tmp_path, tmp_path / "GPU.md") == 3
    text = (tmp_path / "GPU.md").read_text()
    assert "Seen on NVIDIA H200 (139.8 GiB), 16 cores" in text and "day 2, commit cccc" in text
    assert "| copy | ok | 1.0 |  |" in text and "| bad | failed | 1.0 | KeyError: 'x' |" in text
    assert "| old | ok | 1.0 | day 1, commit cccccccccccc. |" in text and "- x: 7" in text
    assert "- GB/s: 4322\n" in text and "| M=1 | 0.1235 | a\\|b |\n| M=2 | 2 |  |" in text
    assert "dry day" not in text and gpu_table.NOTHING not in text
    assert "## ranks\n\nNot measured yet: NCCL" in text


def test_without_records_the_table_says_that_nothing_was_measured(tmp_path):
    assert gpu_table.write_table(tmp_path, tmp_path / "GPU.md") == 0
    text = (tmp_path / "GPU.md").read_text()
    assert gpu_table.NOTHING in text and text.count("Not measured yet") == len(gpu_parts.PARTS)


def test_every_test_file_for_gpus_is_an_item():
    root, on_cpu = gpu_pytest.ROOT, {"test_dist_cuda_variables.py", "test_dist_fake_nccl.py"}
    found = {*root.glob("packages/*/tests/test_*_cuda*.py"), root / "tests/test_cuda.py"}
    found |= {*root.glob("packages/*/tests/test_*_nccl*.py")}
    there = {str(path.relative_to(root)) for path in found if path.name not in on_cpu}
    assert set(gpu_pytest.FILES) == there


OLDER = """
import sys
import pytest
pytest.__version__ = "8.2.2"
raise SystemExit(pytest.main(sys.argv[1:]))
"""


def test_test_files_run_with_an_older_pytest_and_a_torch_that_warns(tmp_path):
    file = tmp_path / "test_old.py"
    file.write_text("import warnings\n\ndef test_it():\n    warnings.warn('old', FutureWarning)\n")
    command = gpu_pytest.pytest_command(str(file))
    status, text = gpu_pytest.told(command)
    assert status == 0 and "1 passed, 1 warning" in text
    status, text = gpu_pytest.told([sys.executable, "-c", OLDER, *command[3:]])
    assert status == 0 and "1 passed" in text
    plain = [sys.executable, "-c", OLDER, "packages/kenotron-dist/tests/test_dist_defer.py"]
    status, text = gpu_pytest.told(plain)
    assert status and "'minversion' requires pytest-9.0, actual pytest-8.2.2" in text


def span(cat, name, ts, dur, tid=1, correlation=None):
    args = {} if correlation is None else {"correlation": correlation}
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


TRACE = [
    span("kernel", "gemm", 100, 50, 7, 1),
    span("kernel", "gemm", 160, 50, 8, 2),  # a pause of 10
    span("gpu_memcpy", "copy", 190, 60, 7, 3),  # beside the kernel
    span("kernel", "norm", 300, 10, 7, 4),  # a pause of 50
    span("kernel", "late", 400, 10, 7, 5),  # a pause of 90
    span("cuda_runtime", "cudaLaunchKernel", 90, 5, 1, 1),
    span("cuda_runtime", "cudaLaunchKernel", 290, 5, 1, 4),
    span("cuda_runtime", "cudaLaunchKernel", 395, 4, 2, 5),
    span("python_function", "/r/src/kenotron_pp/executor.py(7): run", 0, 500),
    span("python_function", "/r/src/kenotron_pp/gone.py(9): run", 10, 20),
    span("python_function", "torch/nn/functional.py(3): norm", 285, 20),
    span("cpu_op", "MulBackward0", 390, 30, 2),
    span("cpu_op", "aten::mul", 392, 20, 2),
]


def test_a_trace_gives_kernels_gaps_and_the_lines_before_them():
    assert gpu_profiling.top_kernels(TRACE)["gemm"] == {"ms": 0.1, "calls": 2, "share": 100 / 180}
    found = gpu_profiling.gaps(TRACE)
    assert [(pause, each["name"]) for pause, each in found] == [(50, "norm"), (90, "late")]
    assert gpu_profiling.host_lines(TRACE, found) == {
        "MulBackward0": {"gaps": 1, "ms": 0.09},
        "kenotron_pp/executor.py(7): run": {"gaps": 1, "ms": 0.05},
    }
    share = gpu_profiling.busy_share(TRACE)
    assert share == {"ms of the trace": 0.31, "share that the GPU is busy": 1 - 150 / 310}


def test_lines_that_wait_are_counted_under_the_package_that_called():
    code = "import warnings\ndef f():\n    warnings.warn('called a synchronizing CUDA operation')\n"
    place = {}
    exec(compile(code, "/somewhere/src/kenotron_pp/executor.py", "exec"), place)
    before = torch.accelerator.synchronize
    with gpu_waiting.synchronisations() as found:
        place["f"]()
        place["f"]()
        warnings.warn("of something else", stacklevel=1)
    assert found == {"kenotron_pp/executor.py:3 in f": 2}
    assert torch.accelerator.synchronize is before


def test_the_bare_llama_computes_what_the_packages_compute():
    sizes = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    bare = bare_llama.BareLlama(**sizes)
    config = LlamaConfig(**sizes, rope_theta=500000.0)
    ours = LayerStack(
        build_decoder(config, Build(Axis.solo("tp"), device="cpu", dtype=torch.float32))
    )
    names = {"qkv": "attention.qkv", "out": "attention.out"}
    names |= {"gate_up": "mlp.gate_up", "down": "mlp.down"}
    state = {}
    for path, value in bare.state_dict().items():
        *folders, last, kind = path.split(".")
        state[".".join([*folders, names.get(last, last), kind])] = value
    ours.load_state_dict(state)
    tokens, labels = torch.randint(61, (2, 10)), torch.randint(61, (2, 10))
    x = bare(tokens)
    logits = ours(tokens.flatten(), Context(torch.arange(10).expand(2, 10)))
    torch.testing.assert_close(bare.head(x).flatten(0, 1), logits)
    due = torch.nn.functional.cross_entropy(logits, labels.flatten())
    for chunk in (20, 7):
        loss = bare_llama.loss_of(x, bare.head.weight, labels, chunk)
        torch.testing.assert_close(loss, due)


def test_the_commit_is_known_without_git(tmp_path, monkeypatch):
    monkeypatch.delenv("KENOTRON_COMMIT", raising=False)
    assert gpu_about.commit_of(tmp_path) == "unknown"
    (tmp_path / "COMMIT").write_text("abc\n")
    assert gpu_about.commit_of(tmp_path) == "abc"
    monkeypatch.setenv("KENOTRON_COMMIT", "def")
    assert gpu_about.commit_of(tmp_path) == "def"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "COMMIT"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    assert len(gpu_about.commit_of(tmp_path)) == 40
    (tmp_path / "new").write_text("")
    assert gpu_about.commit_of(tmp_path).endswith(" with changes")


def test_items_run_in_new_interpreters_too(tmp_path):
    options = ["--dry", "--fresh", "--only", "head"]
    done = day("right", "--out", tmp_path / "out", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    _, found = records(tmp_path / "out/right.jsonl")
    assert (found["item"], found["status"]) == ("head against fp64", "ok")
