"""The rooms of the house: who may import what, how big a file may grow, what no file holds.

Every rule is a function of (path, source) that returns complaints; `path` is relative to the root
of the repository. Each is tried on the repository, and on planted offenders to see it fail.
Nothing is imported, so no package and no torch needs to be installed.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from seams import SPECIMENS, area_of, config_takers, exported_names, named_in, sources

ROOT = Path(__file__).parent.parent
Rule = Callable[[str, str], list[str]]

PROGRAMS = ["apps/*", "*/__main__.py", "kenotron_command/*"]
HUGGING_FACE = [
    "kenotron_data/hub.py",
    "kenotron_data/hub_reach.py",
    "kenotron_data/sft.py",
    "kenotron_data/tokenizer.py",
    "kenotron_data/train_bpe.py",
    "kenotron_data/transformers_tokenizer.py",
]
ROOMS = {  # a module, or a name in one: the files that may use it (paths start below src/)
    "torch.distributed": ["kenotron_dist/*"],
    "kenotron_dist.diagnosis": [  # collectives and placements are read without it
        "kenotron_dist/diagnosis/*",
        "kenotron_dist/mesh.py",
        "kenotron_dist/start.py",
        "kenotron_[!d]*",
        "apps/*",
    ],
    "torch.cuda": ["kenotron_dist/launch.py", "kenotron_engine/cuda_graphs.py"],
    "os.environ": ["kenotron_dist/launch.py", *PROGRAMS],
    "os.environb": ["kenotron_dist/launch.py", "apps/*"],
    "os.getenv": ["kenotron_dist/launch.py", "apps/*"],
    "os.putenv": ["kenotron_dist/launch.py", "apps/*"],
    "flash_attn": ["kenotron_models/attention_flash.py", "kenotron_cp/*"],
    "triton": ["*/ops/*"],
    "safetensors": ["kenotron_ckpt/*"],
    "datasets": HUGGING_FACE,
    "transformers": [
        *HUGGING_FACE,
        "kenotron_models/hf_comparison.py",
        "kenotron_models/transformers_model.py",
        "kenotron_models/hub_folder.py",
        "kenotron_models/transformers_saved.py",
        "apps/convert/kenotron_convert/transformers_export.py",
    ],
    "tokenizers": HUGGING_FACE,
    "lm_eval": ["apps/train/kenotron_train/evaluate/*"],
    "yaml": ["kenotron_config/*"],
    "pydantic": ["kenotron_config/*"],
    "pydantic_core": ["kenotron_config/*"],
    "fsspec": ["kenotron_ckpt/remote.py", "kenotron_data/*"],
    "argparse": PROGRAMS,
    "rich": PROGRAMS,
    "sys.exit": PROGRAMS,
    "print": PROGRAMS,
    "logging.basicConfig": PROGRAMS,
    "logging.config": PROGRAMS,
}
PUBLIC_MODULES = {  # next to a package's own name: what siblings and programs import, and why
    "kenotron_data.config": "the data sections of a config, for programs only",
    "kenotron_dist.autograd": "its collectives have the names of those without gradients",
    "kenotron_dist.boxes": "arithmetic of placements, for packages that store or add up parts",
    "kenotron_dist.diagnosis": "what explains hangs, failures and divergence",
    "kenotron_dist.gradients": "the steps of sum_gradients and clip_gradients, for slices",
    "kenotron_dist.init": "first values; names such as Normal need the module's",
    "kenotron_dist.launch": "what the launcher says, for programs only",
    "kenotron_dist.placement": "how tensors are cut, and what is known of their cuts",
    "kenotron_dist.rng": "random masks; names such as dropout need the module's",
    "kenotron_dist.separate_uses": "between layers and accumulators only",
    "kenotron_dist.statistics": "moments of cut tensors; names such as merge need the module's",
    "kenotron_command.charts": "pictures, for programs that draw",
    "kenotron_cost.probes": "measurements, for calibration only",
    "kenotron_dist.testing": "for tests only",
    "kenotron_dist.weight_products": "between layers and accumulators only",
    "kenotron_models.adapters": "adapters and peft's form of them, to train or convert some",
    "kenotron_models.block_costs": "operations, memory and messages of a block, for planners only",
    "kenotron_models.families": "configs of the families, each of which many never need",
    "kenotron_models.hf": "the formats of Hugging Face, for programs only",
    "kenotron_models.hf_import": "its folders, read and compared, for programs only",
    "kenotron_models.layers": "layers and their specs, for models of one's own",
}
TRAIN = "apps/train/kenotron_train"
NOX = "environments", "lanes", "before_release", "release"
"""What ``noxfile.py`` imports: ``tests/nox_*.py``."""
FOLDERS_OF_TRAIN = (  # the lowest first: each imports those before it only
    "log", "data", "failures", "evaluate", "run", "replay", "report", "doremi",
    "verify", "slurm", "kubernetes", "preflight",
)  # fmt: skip
TAKE_A_CONFIG = {  # the doors: other files take sections of a config, or values made of it
    "kenotron-config": {
        "kenotron_config/availability.py",
        "kenotron_config/cautions.py",
        "kenotron_config/elastic.py",
        "kenotron_config/ignored.py",
        "kenotron_config/yaml_config.py",
    },
    "planner": {
        "kenotron_cost/cost_plan.py",
        "kenotron_cost/knobs.py",
        "kenotron_cost/layouts.py",
        "kenotron_cost/model_folder.py",
        "kenotron_cost/problems.py",
        "kenotron_cost/remedies.py",
        "kenotron_cost/run_plan.py",
        "kenotron_plan/written.py",
    },
    "verify": {
        "verify/changes.py",
        "verify/comparison.py",
        "verify/plain_transformers.py",
        "verify/shrink.py",
    },
    "training road": {
        "doremi/reference_pass.py",
        "kenotron_train/assemble.py",
        "kenotron_train/cli.py",
        "kenotron_train/library.py",
        "kenotron_train/life_cycle.py",
        "replay/replay.py",
        "run/dry_run.py",
        "run/elastic.py",
        "run/replacements.py",
        "run/loop.py",
        "run/preview.py",
        "run/session.py",
        "run/start_ranks.py",
    },
}
REPLACES_PARTS = {  # tests and benchmarks that put another in the place of a sibling's own function
    "packages/kenotron-tp/benchmarks/tp_alone.py",
    "packages/kenotron-tp/tests/test_tp_overlap.py",
}
PLAIN_WORDS = {
    "alike": "equal, or the same",
    "anew": "again, or from scratch",
    "beside": "next to, or during",
    "go on": "continue, or resume",
    "goes on": "continues, or resumes",
    "nobody": "what does not happen",
    "somebody": "what does it",
    "strange": "unknown, or unexpected",
    "whoever": "what does it",
}
QUESTION = re.compile(r"(?:What|Whether|How|Where|Which|Who|When|Why)\b")
FILE_LINES = 300
FUNCTION_LINES = 60
UNCOMMENTED_LINES = 130
DIRECTIVE = re.compile(r"#\s*(?:noqa|type:|pyrefly:|pyright:|fmt:|ruff:|pragma)")
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".sh", ""}
PRODUCTS = re.compile(r"(F|functional|torch)(\.functional)?\.(linear|mm|addmm|matmul|bmm|einsum)")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SIZE = r"(?:\.{3}|(?:\d+ )?[A-Z]{1,2}|[a-z]\w*|\d+)"
SIZES = rf"{SIZE}(?:(?: ?[-+*/] ?| // | or ){SIZE})*"
SHAPE = re.compile(
    r"(?<!\w)\((?=\)|[^()]*(?:\b(?:[A-Z]{1,2}|[a-z])\b|\.{3}|,\)))"  # not (stage, rank)
    rf"(?:{SIZES},|{SIZES}(?:,\s{SIZES})+|\.{{3}})?\)"  # (T, D/t), (n, width), (count,), (...), ()
    r"|\b(?:scalars?|flat|[Ee]lements|[Ee]lementwise)\b"
    r"|\bof\s+(?:[\w'.`]+\s+){0,3}shapes?\b|\b(?:any|same)\s+shapes?\b|\bshapes?\s+of\b"
    r"|``[\w.]*shapes?\b"
    r"|\b[Ss]ee\s[^.]*``\w|\b[Aa]s\s+(?:in\s+)?``\w"  # where they are told, or what has the same
)


def repository_files(root: Path) -> list[str]:
    """List the files of the repository: what git knows or would add, else what lies there."""
    command = ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        files = [root / name for name in listing.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        hidden = re.compile(r"(?:.*/)?(?:\.(?!ci/)[^/]+/|__pycache__/|checkpoints/).*")
        found = {f: f.relative_to(root).as_posix() for f in root.rglob("*")}
        files = [f for f, path in found.items() if not hidden.fullmatch(path)]
    return sorted({f.relative_to(root).as_posix() for f in files if f.is_file()})


def is_test(path: str) -> bool:
    """Say whether `path` is a test, a benchmark or an example, which hold no room of the house."""
    folders = {"tests", "benchmarks", "examples", "templates"}
    return bool(folders & {*path.split("/")}) or path == "noxfile.py"


def python_files(root: Path, *, tests: bool = False) -> list[str]:
    """List the Python files of packages and apps, and with `tests` every other one too."""
    files = [path for path in repository_files(root) if path.endswith(".py")]
    return [p for p in files if tests or (p.startswith(("packages/", "apps/")) and not is_test(p))]


def complaints(rule: Rule, root: Path, paths: list[str]) -> list[str]:
    """Apply one rule to files of the repository at `root`."""
    return [c for path in paths for c in rule(path, (root / path).read_text(encoding="utf-8"))]


def names_used(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield every imported module or name, attribute of one, and builtin, dotted, with its line."""
    known = {"print": "print", "__import__": "__import__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                known[alias.asname or top] = alias.name if alias.asname else top
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}", node.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and (name := dotted(node, known)):
            yield name, node.lineno
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if dotted(node.func, known) in ("importlib.import_module", "__import__"):
                yield str(node.args[0].value), node.lineno


def dotted(node: ast.AST, known: dict[str, str]) -> str:
    """Spell out `a.b.c`, its first name as imported; empty if that name is not in `known`."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value, known)):
        return f"{owner}.{node.attr}"
    return ""


def rooms(path: str, source: str) -> list[str]:
    """Complain of a name that is used outside its room."""
    place = path.split("/src/")[-1]
    found = {
        (line, name)
        for used, line in names_used(ast.parse(source))
        for name in ROOMS
        if used == name or used.startswith(f"{name}.")
    }
    return [
        f"{path}:{line}: {name} belongs in {' or '.join(ROOMS[name])}"
        for line, name in sorted(found)
        if not any(fnmatch(place, room) for room in ROOMS[name])
    ]


def sizes(path: str, source: str) -> list[str]:
    """Complain of a file or a function that is too long."""
    found = []
    if (lines := len(source.splitlines())) > FILE_LINES:
        found.append(f"{path}:{lines}: the file has {lines} lines, more than {FILE_LINES}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DEFINITIONS) and node.end_lineno:
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES:
                found.append(
                    f"{path}:{node.lineno}: {node.name} has {lines} lines, "
                    f"more than {FUNCTION_LINES}"
                )
    return found


def uncommented(path: str, source: str) -> list[str]:
    """Complain of a file of much code without a comment; tables, without a function, need none."""
    nodes, code = [*ast.walk(ast.parse(source))], set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
            return []
        if token.string.strip() and token.type != tokenize.COMMENT:
            code |= {*range(token.start[0], token.end[0] + 1)}
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            code -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    if len(code) <= UNCOMMENTED_LINES or not any(isinstance(node, DEFINITIONS) for node in nodes):
        return []
    return [
        f"{path}: {len(code)} lines of code have no comment: say what the steps of its hardest "
        "function do, and why"
    ]


def naming(path: str, source: str) -> list[str]:
    """Complain of names that say nothing: utils, helpers, common, SomethingManager."""
    vague = re.compile(r"(?:.*_)?(?:utils?|helpers?|common|misc)")
    found = [
        f"{path}: {part} does not say what is in it"
        for part in path.removesuffix(".py").split("/")
        if vague.fullmatch(part)
    ]
    return found + [
        f"{path}:{node.lineno}: {node.name} does not say what it does"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Manager")
    ]


def unfinished(path: str, source: str) -> list[str]:
    """Complain of what is put off: in code, comments or docstrings (in tests: comments)."""
    later = re.compile(r"\b(?:TODO|FIXME|XXX)\b")
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        written = token.type == tokenize.COMMENT or not is_test(path)
        name = token.type == tokenize.NAME and token.string == "NotImplementedError"
        if written and (name or (token.type != tokenize.NAME and later.search(token.string))):
            found.append(
                f"{path}:{token.start[0]}: finish it, or write it under the README's Limits"
            )
    return found


def words(path: str, source: str) -> list[str]:
    """Complain of words that readers of English as a second language do not know, or misread."""
    return [
        f"{path}:{number}: write {PLAIN_WORDS[found.group().lower()]} instead of {found.group()!r}"
        for number, line in enumerate(source.splitlines(), 1)
        for found in re.finditer(rf"\b(?:{'|'.join(PLAIN_WORDS)})\b", line, re.IGNORECASE)
    ]


def openings(path: str, source: str) -> list[str]:
    """Complain of a docstring that begins with a question instead of a verb or a noun."""
    return [
        f"{path}:{node.body[0].lineno}: begin with a verb or a noun instead of {found.group()!r}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (*DEFINITIONS, ast.ClassDef, ast.Module))
        and (found := QUESTION.match(ast.get_docstring(node) or ""))
    ]


def holds_tensors(kind: ast.AST | None) -> bool:
    """Say whether values of an annotation hold tensors; a function of some does not."""
    if isinstance(kind, ast.Name | ast.Attribute):
        return ast.unparse(kind).split(".")[-1] == "Tensor"
    if kind is None or isinstance(kind, ast.Subscript) and "Callable" in ast.unparse(kind.value):
        return False
    return any(map(holds_tensors, ast.iter_child_nodes(kind)))


def shapes(path: str, source: str) -> list[str]:
    """Complain of a public function of tensors whose docstring, or its class's, has no shape."""
    tree, found = ast.parse(source), []
    for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        is_class = isinstance(owner, ast.ClassDef)
        if is_class and owner.name.startswith("_"):
            continue
        about = ast.get_docstring(owner) or "" if is_class else ""
        for node in owner.body:
            if not isinstance(node, DEFINITIONS) or node.name.startswith("_"):
                continue
            arguments = [each for each in ast.walk(node.args) if isinstance(each, ast.arg)]
            kinds = [node.returns, *(each.annotation for each in arguments)]
            said = f"{ast.get_docstring(node) or ''}\n{about}"
            if "overload" in map(ast.unparse, node.decorator_list):
                continue
            if any(map(holds_tensors, kinds)) and not SHAPE.search(said):
                found.append(
                    f"{path}:{node.lineno}: {node.name} has tensors: say their shapes, such as "
                    "(T, D), (), flat or of any shape, or who does: See ``Owner``"
                )
    return found


def silenced(path: str, source: str) -> list[str]:
    """Complain of a checker that is silenced without saying which of its rules."""
    bare = re.compile(
        r"#\s*(?:(?:type|pyrefly|pyright):\s*ignore(?!\[)|noqa(?!:\s*[A-Z])"
        r"|(?:ruff|flake8):\s*noqa|mypy:|pyrefly:\s*ignore-errors)"
    )
    return [
        f"{path}:{token.start[0]}: name the rule that is silenced, on its line"
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and bare.search(token.string)
    ]


def global_state(path: str, source: str) -> list[str]:
    """Complain of a function that rebinds a name of its module."""
    return [
        f"{path}:{node.lineno}: pass {', '.join(node.names)} as an argument, not as a global"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Global)
    ]


def weight_products(path: str, source: str) -> list[str]:
    """Complain of a product with a weight outside the room that decides how it is computed."""
    if path.endswith("kenotron_tp/products.py"):
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        operands: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            operands = [node.left, node.right]
        elif isinstance(node, ast.Call) and PRODUCTS.fullmatch(ast.unparse(node.func)):
            operands = list(node.args)
        if any(re.search(r"\bweight\b", ast.unparse(each)) for each in operands):
            found.append(f"{path}:{node.lineno}: a product with a weight: take kenotron_tp.matmul")
    return found


def local_paths(path: str, source: str) -> list[str]:
    """Complain of a path that exists on one machine only."""
    foreign = re.compile(r"\.\./share[d]\b|(?<![\w.])/(?:wor[k]|roo[t]|opt/wheel[s])/")
    return [
        f"{path}:{number}: this path is on one machine only"
        for number, line in enumerate(source.splitlines(), 1)
        if foreign.search(line)
    ]


def module_name(path: str) -> str:
    """Give the dotted name of a file below src/ or below its app's folder."""
    inside = path.split("/src/")[1] if "/src/" in path else "/".join(path.split("/")[2:])
    return inside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_modules(path: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield every module, or name in one, that a file imports, made absolute, with its line."""
    package = module_name(path).split(".")
    package = package if path.endswith("/__init__.py") else package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *([node.module] if node.module else [])]
            yield from ((".".join([*base, alias.name]), node.lineno) for alias in node.names)


def import_graph(
    sources: dict[str, str], room_of: Callable[[str], str] = module_name
) -> dict[str, set[str]]:
    """Map each room to those that its modules import, also in functions.

    Args:
        sources: code by path.
        room_of: the room of a path, by default the module itself.
    """
    rooms_of = {module_name(path): room_of(path) for path in sources}
    graph: dict[str, set[str]] = {room: set() for room in rooms_of.values()}
    for path, source in sources.items():
        names = {name for name, _ in imported_modules(path, ast.parse(source))}
        names = {n if n in rooms_of else n.rpartition(".")[0] for n in names}
        own = room_of(path)
        graph[own] |= {rooms_of[name] for name in names & rooms_of.keys()} - {own}
    return graph


def import_cycle(sources: dict[str, str], room_of: Callable[[str], str] = module_name) -> list[str]:
    """Complain of modules, or rooms, that import one another in a circle."""
    try:
        TopologicalSorter(import_graph(sources, room_of)).prepare()
    except CycleError as error:
        return [f"circular import: {' -> '.join(reversed(error.args[1]))}"]
    return []


def folder_of(path: str) -> str:
    """Give the folder of a module inside its package; of one directly in it, the module."""
    package, *inside = module_name(path).split(".")
    in_folder = len(inside) > 1 or (inside and path.endswith("/__init__.py"))
    return inside[0] if in_folder else ".".join([package, *inside])


PARTS = re.compile(
    r"(?:[\w.*]*\.)?(?:gate_up|qkv|q_norm|k_norm|mlp|attention|mlp_norm|attention_norm|self_attn)(?:\..*)?"
    r"|is_(?:llama|mistral|qwen\d|starcoder2)_config"
)
PARTS_OF_OTHERS = ("kenotron_models/", "kenotron_nanotron/")  # the second: foreign files


def anatomy(path: str, source: str) -> list[str]:
    """Complain of a string that names a part of a decoder outside of models."""
    if any(room in path for room in PARTS_OF_OTHERS):
        return []
    return [
        f"{path}:{node.lineno}: {node.value!r} is a part of a decoder, which models alone names"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and PARTS.fullmatch(node.value)
    ]


Public = dict[str, set[str]]


def public_names(root: Path) -> Public:
    """Map each package, and each public module of one, to the names in its `__all__`."""
    paths = [path for path in python_files(root) if path.startswith("packages/")]
    modules = {module_name(path): path for path in paths}
    wanted = {name for name in modules if "." not in name} | PUBLIC_MODULES.keys()
    return {
        name: exported_names((root / modules[name]).read_text(encoding="utf-8"))
        for name in sorted(wanted & modules.keys())
    }


def deep_imports(path: str, source: str, public: Public) -> list[str]:
    """Complain of an import from a sibling that is none of its public names."""
    own = path.split("/")[1].replace("-", "_") if path.startswith("packages/") else ""
    found = []
    for name, line in imported_modules(path, ast.parse(source)):
        module, _, last = name.rpartition(".")
        if (
            name.split(".")[0] in public.keys() - {own}
            and name not in public
            and last not in public.get(module, ())
        ):
            found.append(f"{path}:{line}: {name} is no public name: import one of {module}.__all__")
    return found


HOUSE_RULES: list[Rule] = [  # packages and apps
    rooms, sizes, uncommented, naming, words, openings, shapes, global_state, anatomy,
    weight_products,
]  # fmt: skip
WIDE_RULES: list[Rule] = [unfinished, silenced]  # every Python file


@pytest.mark.parametrize("rule", HOUSE_RULES, ids=lambda rule: rule.__name__)
def test_packages_and_apps_keep_the_rule(rule):
    found = complaints(rule, ROOT, python_files(ROOT))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", WIDE_RULES, ids=lambda rule: rule.__name__)
def test_every_python_file_keeps_the_rule(rule):
    found = complaints(rule, ROOT, python_files(ROOT, tests=True))
    assert not found, "\n".join(found)


def test_every_seam_has_a_specimen_in_the_source():
    texts = {path: path.read_text(encoding="utf-8") for path in sources()}
    assert all(named_in(pattern, texts) for pattern in SPECIMENS.values())


def test_a_whole_config_is_taken_at_the_door_only():
    found = defaultdict(set)
    for path in sources():
        if config_takers(ast.parse(path.read_text(encoding="utf-8"))):
            found[area_of(name := "/".join(path.parts[-2:]))].add(name)
    assert found == TAKE_A_CONFIG


@pytest.mark.parametrize(
    "source",
    [
        "def f(x: int, *, config: Config | None = None): ...",
        "class A:\n    async def f(self, config: Config): ...",
        "class A:\n    x: int\n    config: 'Config'",
    ],
)
def test_a_planted_taker_of_a_config_is_found(source):
    assert config_takers(ast.parse(source))
    assert not config_takers(ast.parse(source.replace("Config", "LoggingConfig")))


def test_the_sessions_of_nox_keep_the_size():
    assert not complaints(
        sizes,
        ROOT,
        [
            "noxfile.py",
            *(f"tests/nox_{each}.py" for each in NOX),
        ],
    )


def test_ci_runs_every_session_that_nox_runs():
    texts = [(ROOT / name).read_text() for name in ("noxfile.py", "tests/nox_before_release.py")]
    found = re.findall(r"^@nox\.session(.*)\ndef (\w+)", "\n".join(texts), re.MULTILINE)
    named = {"some_variants": "tests"}
    usual = {named.get(name, name) for options, name in found if "default=False" not in options}
    ci = re.findall(r"--session ([\w ]+)", (ROOT / ".ci/run").read_text())
    assert {"repo", "tests", "wheels"} <= usual == {*" ".join(ci).split()}


def test_no_file_names_a_place_on_one_machine():
    paths = [path for path in repository_files(ROOT) if Path(path).suffix in TEXT]
    found = complaints(local_paths, ROOT, paths)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", sorted({"/".join(p.split("/")[:2]) for p in python_files(ROOT)}))
def test_no_module_imports_itself_through_others(folder):
    paths = [path for path in python_files(ROOT) if path.startswith(f"{folder}/")]
    assert not import_cycle({path: (ROOT / path).read_text() for path in paths})


def train_sources() -> dict[str, str]:
    paths = [path for path in python_files(ROOT) if path.startswith(f"{TRAIN}/")]
    return {path: (ROOT / path).read_text() for path in paths}


def test_no_folder_of_train_imports_itself_through_others():
    assert not import_cycle(train_sources(), folder_of)


def test_folders_of_train_import_lower_ones_only():
    graph = import_graph(train_sources(), folder_of)
    folders = {room for room in graph if "." not in room} - {"kenotron_train"}
    assert folders == {*FOLDERS_OF_TRAIN}
    for number, folder in enumerate(FOLDERS_OF_TRAIN):
        higher = graph[folder] & {*FOLDERS_OF_TRAIN[number:], "kenotron_train.cli"}
        assert not higher, f"{folder} imports {sorted(higher)}, which are above it"


def test_siblings_import_public_names_only():
    paths = python_files(ROOT, tests=True)
    public = public_names(ROOT)
    rule = partial(deep_imports, public=public)
    of_programs = [path for path in paths if path.startswith("apps/") and is_test(path)]
    left_out = {*REPLACES_PARTS, *of_programs}  # tests of programs look into what they assemble
    found = complaints(rule, ROOT, [path for path in paths if path not in left_out])
    assert not found, "\n".join(found)
    assert all(public[name] for name in PUBLIC_MODULES)
    assert all(complaints(rule, ROOT, [path]) for path in REPLACES_PARTS)


DIST, TP = "packages/kenotron-dist/src/kenotron_dist", "packages/kenotron-tp/src/kenotron_tp"
LONG_FUNCTION = "def long():\n" + "    x = 1\n" * 60
LONG_TABLE, SHORT_FUNCTION = "x = 1\n" * 130, "def f(): ..."
OFFENDERS: list[tuple[Rule, str, str, str]] = [
    (rooms, f"{TP}/a.py", "import torch.distributed as dist", "torch.distributed belongs in"),
    (rooms, f"{TP}/a.py", "from torch import distributed", "torch.distributed belongs in"),
    (rooms, f"{TP}/a.py", "from torch.distributed import nn", "torch.distributed belongs in"),
    (rooms, f"{TP}/a.py", "import torch\ntorch.distributed.barrier()", "a.py:2: torch.distributed"),
    (rooms, "apps/train/kenotron_train/a.py", "import torch.distributed", "torch.distributed"),
    (
        rooms,
        f"{DIST}/axis.py",
        "import kenotron_dist.diagnosis.hang_diagnosis",
        "diagnosis belongs",
    ),
    (rooms, f"{DIST}/mesh.py", "import os\nos.environ['RANK']", "os.environ belongs in"),
    (rooms, f"{DIST}/mesh.py", "from os import environ as e", "os.environ belongs in"),
    (rooms, f"{DIST}/mesh.py", "import os as o\no.getenv('RANK')", "os.getenv belongs in"),
    (rooms, f"{DIST}/mesh.py", "import torch as t\nt.cuda.current_device()", "torch.cuda belongs"),
    (rooms, f"{TP}/a.py", "def f():\n    import flash_attn", "a.py:2: flash_attn belongs in"),
    (rooms, f"{TP}/a.py", "import triton.language as tl", "triton belongs in"),
    (rooms, f"{TP}/a.py", "from safetensors.torch import save", "safetensors belongs in"),
    (rooms, f"{TP}/a.py", "import datasets, transformers, tokenizers", "tokenizers belongs in"),
    (rooms, f"{TP}/a.py", "import importlib\nimportlib.import_module('yaml')", "yaml belongs in"),
    (rooms, f"{TP}/a.py", "__import__('pydantic')", "pydantic belongs in"),
    (rooms, "apps/train/kenotron_train/a.py", "import yaml", "yaml belongs in kenotron_config"),
    (rooms, f"{TP}/a.py", "import fsspec", "fsspec belongs in"),
    (rooms, f"{TP}/a.py", "import argparse", "argparse belongs in"),
    (rooms, f"{TP}/a.py", "import sys\nsys.exit(1)", "sys.exit belongs in"),
    (rooms, f"{TP}/a.py", "print('x')", "print belongs in"),
    (rooms, f"{TP}/a.py", "x = map(print, [])", "print belongs in"),
    (rooms, f"{TP}/a.py", "import rich", "rich belongs in"),
    (rooms, f"{TP}/a.py", "import logging\nlogging.basicConfig()", "logging.basicConfig belongs"),
    (words, f"{TP}/a.py", "x = 1\n# Made Anew", "a.py:2: write again, or from scratch instead"),
    (openings, f"{TP}/a.py", "'''What a plan says.'''", "a.py:1: begin with a verb or a noun"),
    (openings, f"{TP}/a.py", "class A:\n    ''' Where it is.'''", "a.py:2: begin with a verb"),
    (openings, f"{TP}/a.py", "def f():\n    '''\n    Whether so.'''", "instead of 'Whether'"),
    (openings, f"{TP}/a.py", "async def f():\n    'How it is.'", "instead of 'How'"),
    (shapes, f"{TP}/a.py", "def f(x: Tensor): 'Double x.'", "a.py:1: f has tensors: say their"),
    (shapes, f"{TP}/a.py", "def f(x: int) -> tuple[Tensor, ...]: ...", "f has tensors"),
    (shapes, f"{TP}/a.py", "'''(T, D)'''\ndef f(x: torch.Tensor | None): ...", "f has tensors"),
    (shapes, f"{TP}/a.py", "def f(*x: Tensor): '(0, 1) (never, ever) f()'", "f has tensors"),
    (shapes, f"{TP}/a.py", "class A:\n    'It.'\n    def f(self, x: Tensor): ...", "f has tensors"),
    (sizes, f"{TP}/a.py", "x = 1\n" * 301, "the file has 301 lines, more than 300"),
    (sizes, f"{TP}/a.py", LONG_FUNCTION, "long has 61 lines, more than 60"),
    (uncommented, f"{TP}/a.py", LONG_TABLE + SHORT_FUNCTION, "131 lines of code have no comment"),
    (uncommented, f"{TP}/a.py", LONG_TABLE + SHORT_FUNCTION + "  # noqa: E501", "have no comment"),
    (naming, f"{TP}/utils.py", "", "utils does not say"),
    (naming, f"{TP}/ops/tensor_helpers.py", "", "tensor_helpers does not say"),
    (naming, f"{TP}/common/a.py", "", "common does not say"),
    (naming, f"{TP}/a.py", "class ShardManager: ...", "ShardManager does not say"),
    (unfinished, f"{TP}/a.py", "raise NotImplementedError('x')", "a.py:1: finish it"),
    (unfinished, f"{TP}/a.py", "x = 1  # TODO: more", "finish it"),
    (unfinished, f"{TP}/a.py", '"""FIXME."""', "finish it"),
    (unfinished, "packages/kenotron-tp/tests/test_tp_a.py", "# TODO", "finish it"),
    (silenced, f"{TP}/a.py", "x = 1  # type: ignore", "name the rule"),
    (silenced, f"{TP}/a.py", "x = 1  # noqa", "name the rule"),
    (silenced, f"{TP}/a.py", "# ruff: noqa: E501", "name the rule"),
    (silenced, "tests/test_a.py", "x = 1  # pyrefly: ignore", "name the rule"),
    (anatomy, f"{TP}/a.py", "x = 'layers.3.mlp.down'", "a.py:1: 'layers.3.mlp.down' is a part"),
    (anatomy, f"{TP}/a.py", "x = 'gate_up'", "'gate_up' is a part of a decoder"),
    (anatomy, f"{TP}/a.py", "x = 'is_llama_config'", "'is_llama_config' is a part of a decoder"),
    (global_state, f"{TP}/a.py", "x = 1\ndef f():\n    global x\n    x = 2", "a.py:3: pass x as"),
    (weight_products, f"{TP}/a.py", "y = x @ self.weight.t()", "a product with a weight: take"),
    (weight_products, f"{TP}/a.py", "F.linear(x, layer.weight)", "a product with a weight"),
    (weight_products, f"{TP}/a.py", "torch.addmm(b, x, weight.t())", "a product with a weight"),
    (local_paths, "README.md", "see .." + "/shared/plan.md", "README.md:1: this path"),
    (local_paths, f"{TP}/a.py", "x = '" + "/work" + "/main'", "this path is on one machine"),
]
LAWFUL: list[tuple[Rule, str, str]] = [
    (rooms, f"{DIST}/mesh.py", "import torch.distributed as dist"),
    (rooms, f"{DIST}/launch.py", "import os, torch\nos.environ['RANK']\ntorch.cuda.device_count()"),
    (rooms, f"{TP}/a.py", "import torch\ndef f(torch_distributed, x): return x.cuda, x.print()"),
    (rooms, f"{TP}/a.py", "from kenotron_dist import distributed\nimport os\nos.getpid()"),
    (rooms, f"{TP}/ops/a.py", "import triton"),
    (rooms, f"{TP}/__main__.py", "import argparse, sys\nprint(1)\nsys.exit(1)"),
    (rooms, "apps/train/kenotron_train/a.py", "import os, rich\nprint(os.environ)"),
    (rooms, "packages/kenotron-config/src/kenotron_config/a.py", "import yaml, pydantic"),
    (weight_products, f"{TP}/products.py", "F.linear(x, weight)"),
    (weight_products, f"{TP}/a.py", "y = matmul(x, self.weight) + q @ k"),
    (words, f"{TP}/a.py", "besides = 1  # a strangeness, going on"),
    (openings, f"{TP}/a.py", "'Whatever is read. What is not.'\nx = 'What is it?'  # Why not"),
    (shapes, f"{TP}/a.py", "def f(x: Tensor): 'Double x (T, D/t).'"),
    (shapes, f"{TP}/a.py", "def f(x: list[Tensor]): 'Add tensors of any shape.'"),
    (shapes, f"{TP}/a.py", "def f(x: Tensor):\n    '''See\n    ``Part``.'''"),
    (shapes, f"{TP}/a.py", "class A:\n    'Of (n,).'\n    def f(self, x: Tensor): ..."),
    (shapes, f"{TP}/a.py", "def _f(x: Tensor): ...\nclass _A:\n    def f(self, x: Tensor): ..."),
    (shapes, f"{TP}/a.py", "def f(x: Callable[[Tensor], Tensor], y: TensorLayout): ..."),
    (shapes, f"{TP}/a.py", "@overload\ndef f(x: Tensor) -> Tensor: ..."),
    (sizes, f"{TP}/a.py", "x = 1\n" * 300),
    (sizes, f"{TP}/a.py", LONG_FUNCTION.removesuffix("    x = 1\n")),
    (uncommented, f"{TP}/a.py", f"# Count.\n{LONG_TABLE}{SHORT_FUNCTION}"),
    (uncommented, f"{TP}/a.py", f"'Long.'\n\n{LONG_TABLE}"),
    (uncommented, f"{TP}/a.py", LONG_TABLE.removesuffix("x = 1\n") + SHORT_FUNCTION),
    (naming, f"{TP}/commonplace.py", "class Management: ..."),
    (unfinished, f"{TP}/a.py", "'''A mastodon.'''\nx = NotImplemented"),
    (unfinished, "tests/test_a.py", "x = 'TODO'"),
    (silenced, f"{TP}/a.py", "x = 1  # type: ignore[assignment]\ny = '# noqa'  # noqa: E501"),
    (anatomy, f"{TP}/a.py", "x = 'What has mlp.down in it'\ny = 'a qkv'"),
    (anatomy, "packages/kenotron-models/src/kenotron_models/a.py", "x = 'mlp.down'"),
    (local_paths, f"{TP}/a.py", "x = 'net/work/a', 'https://example.org/work'"),
]


@pytest.mark.parametrize(("rule", "path", "source", "words"), OFFENDERS)
def test_a_planted_offender_is_found(rule, path, source, words, tmp_path):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(source)
    found = complaints(rule, tmp_path, repository_files(tmp_path))
    assert any(words in complaint for complaint in found), found


@pytest.mark.parametrize(("rule", "path", "source"), LAWFUL)
def test_lawful_code_is_left_in_peace(rule, path, source):
    assert rule(path, source) == []


PUBLIC = {"kenotron_dist": {"Mesh"}, "kenotron_dist.rng": {"dropout"}, "kenotron_tp": {"Linear"}}


@pytest.mark.parametrize(
    "source",
    [
        "from kenotron_dist.mesh import Mesh",
        "from kenotron_dist import Axis",
        "from kenotron_dist import mesh",
        "from kenotron_dist.rng import Mesh",
        "import kenotron_dist.mesh",
        "def f():\n    from kenotron_dist.mesh import Mesh",
    ],
)
def test_a_planted_deep_import_is_found(source):
    for path in (f"{TP}/a.py", "apps/train/kenotron_train/a.py", "tests/test_a.py"):
        assert "is no public name" in deep_imports(path, source, PUBLIC)[0]


@pytest.mark.parametrize(
    "source",
    [
        "from kenotron_dist import Mesh, rng",
        "from kenotron_dist.rng import dropout",
        "import kenotron_dist, kenotron_dist.rng, torch.nn",
        "from kenotron_tp.linear import Linear",
        "from .linear import Linear",
    ],
)
def test_public_names_and_those_of_the_own_package_are_no_deep_imports(source):
    assert deep_imports(f"{TP}/a.py", source, PUBLIC) == []


@pytest.mark.parametrize(
    "sources",
    [
        {"a": "from kenotron_tp import b", "b": "from .a import x"},
        {"a": "import kenotron_tp.b", "b": "def f():\n    from . import a"},
        {"a": "from .b import x", "b": "from .c import x", "c": "from kenotron_tp.a import y"},
        {"__init__": "from .a import x", "a": "from kenotron_tp import x"},
    ],
)
def test_a_planted_circle_is_found(sources):
    planted = {f"{TP}/{name}.py": source for name, source in sources.items()}
    assert "circular import: kenotron_tp" in import_cycle(planted)[0]


@pytest.mark.parametrize(
    "sources",
    [
        {"a/x": "from kenotron_train.b.y import f", "b/y": "", "b/z": "import kenotron_train.a.x"},
        {
            "a/x": "def f():\n    from ..b import y",
            "b/y": "from kenotron_train.a import z",
            "a/z": "",
        },
        {"a/__init__": "from kenotron_train.b import y", "b/y": "import kenotron_train.a"},
        {
            "a/x": "from kenotron_train.c import f",
            "c": "from kenotron_train.a.z import f",
            "a/z": "",
        },
    ],
)
def test_a_planted_circle_of_folders_is_found(sources):
    planted = {f"{TRAIN}/{name}.py": source for name, source in sources.items()}
    assert "circular import: " in import_cycle(planted, folder_of)[0]


def test_modules_in_order_are_no_circle():
    sources = {"__init__": "from . import a\nfrom .b import x", "a": "from .b import x", "b": ""}
    assert import_cycle({f"{TP}/{name}.py": source for name, source in sources.items()}) == []


def test_what_tools_leave_behind_is_no_part_of_the_repository(tmp_path):
    for path in (".ci/run", ".gitignore", ".nox/lint/a.py", "tests/__pycache__/a.pyc", "apps/a.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    assert repository_files(tmp_path) == [".ci/run", ".gitignore", "apps/a.py"]


def test_files_outside_packages_and_apps_are_seen_by_the_wide_rules_only(tmp_path):
    for path in ("noxfile.py", "tests/test_a.py", f"{TP}/a.py", "packages/x/tests/test_x_a.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    assert python_files(tmp_path) == [f"{TP}/a.py"]
    assert len(python_files(tmp_path, tests=True)) == 4


def test_no_two_classes_share_a_name():
    places = defaultdict(list)
    for path in sources():
        if {"templates", "examples"} & {*path.parts}:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append("/".join(path.parts[-2:]))
    assert not {name: where for name, where in places.items() if len(where) > 1}
