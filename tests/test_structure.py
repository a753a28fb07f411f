"""What depends on what: imports are a DAG, the core stands alone, and what needs no torch never imports it."""

import ast
import subprocess
import sys
from collections.abc import Mapping
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from fpipe import effects
from fpipe.tables import TABLE
from tests.support.catalogue import FUNCTIONS
from tests.support.combinations import one_in

ROOT = Path(__file__).resolve().parents[1]
LAZY = ["fpipe", "fpipe.handlers", "fpipe.interop", "fpipe.parallel", "fpipe.tensorboard", "fpipe.transforms"]


class Modules(Mapping):
    """Name -> syntax tree of the modules in some folders, parsed when it is looked up."""

    def __init__(self, *folders):
        self.paths, self.trees = {}, {}
        for folder in folders:
            for path in (ROOT / folder).rglob("*.py"):  # which doesn't follow the links inside it
                names = ("fpipe", *path.relative_to(ROOT).with_suffix("").parts)[folder == "fpipe" :]
                self.paths[".".join(names).removesuffix(".__init__")] = path

    def __getitem__(self, name):
        if name not in self.trees:
            self.trees[name] = ast.parse(self.paths[name].read_text())
        return self.trees[name]

    def __contains__(self, name):
        return name in self.paths

    def __iter__(self):
        return iter(self.paths)

    def __len__(self):
        return len(self.paths)


MODULES = Modules("fpipe", "schedules", "interop")


def for_type_checkers(node):
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def run_on_import(node):
    """The nodes below one that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not for_type_checkers(child):
            yield child
            yield from run_on_import(child)


def imports(nodes):
    """The modules that import statements name; `from a import b` names a.b where that is a module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names)


# Package -> packages that it may import: at run time, late, or for types. The longest name that fits a module is its.
LAYOUT = {
    "fpipe._lazy": "",
    "fpipe._version": "",
    "fpipe.effects": "",
    "fpipe.errors": "effects",
    "fpipe.store": "errors",
    "fpipe.plan": "effects errors",
    "fpipe.tables": "effects",
    "fpipe.costs": "tables plan effects errors",
    "fpipe._format": "costs plan",
    "fpipe.flight": "tensorboard.files programs tables _format errors",
    "fpipe.programs": "_format tables costs plan effects errors",
    "fpipe.timelines": "_format programs tables costs plan effects errors",
    "fpipe.schedules": "timelines programs tables _format costs plan effects errors",
    "fpipe.devices": "",
    "fpipe.stages": "_format devices plan effects errors",
    "fpipe.policies": "",
    "fpipe.autodiff.graph": "store policies stages devices errors",
    "fpipe.autodiff": "store autodiff.graph policies stages devices plan effects errors",
    "fpipe.handlers": "store autodiff autodiff.graph stages devices programs tables plan effects errors",
    "fpipe.handlers.distributed": (
        "flight store handlers autodiff autodiff.graph stages devices programs tables plan effects errors"
    ),
    "fpipe.profiling": (
        "policies handlers handlers.distributed autodiff autodiff.graph stages devices timelines programs _format "
        "costs tables plan effects errors"
    ),
    "fpipe.training": (
        "profiling handlers handlers.distributed autodiff policies stages devices programs _format tables plan effects "
        "errors"
    ),
    "fpipe.generating": "profiling handlers autodiff policies stages devices programs _format plan errors",
    "fpipe.transforms": "stages errors",
    "fpipe.parallel": "stages devices errors",
    "fpipe.interop.torch_csv": "schedules programs plan effects errors",
    "fpipe.interop.torch_traces": (
        "interop.torch_csv schedules tensorboard.files timelines programs _format costs plan effects errors"
    ),
    "fpipe.interop.sampling": "errors",
    "fpipe.interop.sharding": "stages errors",
    "fpipe.interop.styles": "",
    "fpipe.interop.modules": "interop.sharding stages plan errors",
    "fpipe.interop.splitting": "interop.modules autodiff.graph stages devices plan errors",
    "fpipe.interop.checkpoints.manifest": "",
    "fpipe.interop.checkpoints.slots": "",
    "fpipe.interop.checkpoints.leftovers": "interop.checkpoints.slots",
    "fpipe.interop.checkpoints": (
        "interop.checkpoints.manifest interop.checkpoints.slots interop.modules store handlers handlers.distributed "
        "stages _format plan errors"
    ),
    "fpipe.interop.elasticity": (
        "schedules handlers handlers.distributed store stages programs _format costs plan effects errors"
    ),
    "fpipe.interop.modes": "interop.splitting interop.modules stages errors",
    "fpipe.interop.optim": "stages errors",
    "fpipe.interop.adapters": "stages",
    "fpipe.interop.preloading": "",
    "fpipe.interop.torchrun": "interop.preloading",
    "fpipe.interop.torch_pipe": "interop.modules stages errors",
    "fpipe.interop.transformers": "interop.splitting interop.modules stages errors",
    "fpipe.cli": (
        "schedules interop.torch_csv interop.torch_traces interop.checkpoints.manifest interop.checkpoints.leftovers "
        "tensorboard.files tensorboard.server flight timelines programs _format _version tables costs plan effects "
        "errors"
    ),
    "fpipe.__main__": "cli",
    "fpipe.tensorboard.files": "_format timelines programs tables plan effects errors",
    "fpipe.tensorboard.server": "tensorboard.files flight _format timelines tables effects errors",
    "fpipe.tensorboard.recording": (
        "tensorboard.files flight profiling training handlers autodiff stages devices timelines programs plan effects "
        "errors"
    ),
}
# The one import against the layout: a schedule's name becomes a schedule. It is within a function.
LATE = {"fpipe.programs.schedules": "fpipe.schedules.catalogue"}
TORCH_FREE = [
    "_format",
    "flight",
    "effects",
    "errors",
    "plan",
    "tables",
    "costs",
    "programs",
    "timelines",
    "schedules",
    "tensorboard.files",
    "tensorboard.server",
    "interop.torch_csv",
    "interop.torch_traces",
    "interop.checkpoints.manifest",
    "interop.checkpoints.slots",
    "interop.checkpoints.leftovers",
    "cli",
]


def package_of(module):
    return max((name for name in LAYOUT if f"{module}.".startswith(f"{name}.")), key=len, default=None)


def test_the_core_is_packages_and_few_modules():
    flat = [path.stem for path in (ROOT / "fpipe").glob("*.py") if not path.stem.startswith("__")]
    assert len(flat) <= 10


def test_modules_are_found():
    assert {"fpipe.effects", "fpipe.handlers.local", "fpipe.schedules.gpipe", "fpipe.interop.modes"} <= set(MODULES)


def test_imports_are_absolute():
    relative = [(name, m) for name, tree in MODULES.items() for m in imports(ast.walk(tree)) if m[0] == "."]
    assert relative == []


def test_imports_are_a_dag():
    """Imports for types and within functions count."""
    graph = {
        name: set(imports(ast.walk(tree))) & set(MODULES) - {name, LATE.get(name)} for name, tree in MODULES.items()
    }
    assert "fpipe.effects" in graph["fpipe.programs.lowering"]
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)  # else a CycleError, which names it


def test_packages_are_a_dag():
    graph = {name: {f"fpipe.{imported}" for imported in LAYOUT[name].split()} for name in LAYOUT}
    assert set(TopologicalSorter(graph).static_order()) == set(LAYOUT)


def test_every_module_has_its_place_in_the_layout():
    assert [name for name in MODULES if package_of(name) is None and name not in LAZY] == []


@one_in(4)
@pytest.mark.parametrize("package", LAYOUT)
def test_a_package_imports_what_the_layout_says(package):
    allowed = {package, "fpipe._lazy", *(f"fpipe.{name}" for name in LAYOUT[package].split())}
    wrong = [
        (name, imported)
        for name, tree in MODULES.items()
        if package_of(name) == package
        for imported in imports(run_on_import(tree) if name in LAZY else ast.walk(tree))
        if imported.split(".")[0] == "fpipe" and package_of(imported) not in allowed and imported != LATE.get(name)
    ]
    assert wrong == []


def test_an_import_against_the_layout_is_late():
    for name, imported in LATE.items():
        assert imported in imports(ast.walk(MODULES[name]))
        assert imported not in imports(run_on_import(MODULES[name]))


def names_cuda(node):
    if isinstance(node, ast.Import | ast.ImportFrom):
        return "torch.cuda" in ast.unparse(node).replace(" import ", ".")
    return isinstance(node, ast.Attribute) and (node.attr == "is_cuda" or ast.unparse(node) == "torch.cuda")


def test_cuda_is_named_by_devices_alone():
    """Everything else asks a `Device`, so that it runs on a fake one in the tests."""
    named = {name for name, tree in MODULES.items() if any(map(names_cuda, ast.walk(tree)))}
    assert "fpipe.devices.devices" in named
    outside = {name for name in named if package_of(name) != "fpipe.devices"}
    assert outside == set()


def test_packages_without_torch_never_import_it():
    code = ["import sys"]
    for package in TORCH_FREE:
        names = [name for name in MODULES if f"{name}.".startswith(f"fpipe.{package}.")]
        code += [f"import {', '.join(names)}", f"print({package!r}, 'torch' in sys.modules)"]
    command = [sys.executable, "-c", "\n".join(code)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == [f"{package} False" for package in TORCH_FREE]


def test_lowering_and_drawing_by_public_names_never_import_torch():
    code = """if True:
        import sys
        import fpipe
        plan = fpipe.Plan(fpipe.Placement.loop(2), 3)
        fpipe.verify(fpipe.schedules.one_f_one_b, plan)
        print(fpipe.draw(fpipe.schedules.gpipe, plan))
        print("torch" in sys.modules)
    """
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == [
        "rank 0  F0 F1 F2 .  .  B0 B1 B2",
        "rank 1  .  F0 F1 F2 B0 B1 B2",
        "False",
    ]


@pytest.mark.parametrize("package", [*LAZY, "fpipe.schedules"])
def test_every_name_of_a_package_is_public(package):
    """All that a package imports for others it re-exports, so that type checkers see it too."""
    imported = {a.name for n in ast.walk(MODULES[package]) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert imported - {"TYPE_CHECKING", "VERSION", "attach", "reexports"} == set(import_module(package).__all__)


@pytest.mark.parametrize("package", [*LAZY, "fpipe.schedules"])
def test_every_public_name_can_be_got_and_listed(package):
    module = import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("package", LAZY)
def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = import_module(package).nothing


SURFACE = {
    "fpipe": """
        Batch Cache Costs Edges Link LiveBytes LossScale Measurement Microbatches NonFiniteError Output Pipeline
        Placement Plan Precision Program Recording Report Residence ScheduleError Stage StageError Timeline
        TransportError WhatIf
        autoregressive by_length
        clip_by_global_norm constrain draw effects evaluate footprint gather generate generator
        global_norm handlers interop lower
        offload pack parallel
        peak_bytes
        policies profile schedules simulate tensorboard train_step transforms value_and_grad verify
        what_if
    """,
    "fpipe.handlers": """
        Backend Distributed Gloo Handler Inputs Local NCCL Observer Peers Reference Replicas Results auto
    """,
    "fpipe.schedules": " ".join(
        sorted(
            {*FUNCTIONS, "CATALOGUE", "Found", "from_table", "get", "lower_bound", "pareto", "search"}
            | {"MACHINES", "Machine", "ModelShape", "SHAPES", "Strategy", "strategies", "updating"}
        )
    ),
    "fpipe.parallel": """
        Routing Vocabulary all_gather all_reduce all_to_all attention balance_loss copy dropped mixture_of_experts
        positions reduce_scatter route shard_sequence shift unshard_sequence
    """,
    "fpipe.tensorboard": "Recorder",
    "fpipe.transforms": "Dual dual hvp jvp per_sample primals pushforward tangents vmap",
    "fpipe.interop": """
        BadTrace CheckpointError Checkpoints Elastic End Memory Optimizer Run TracedStep Traces buffers elastic
        eval_mode export_safetensors from_csv from_functions from_modules from_pipe from_state_dict from_traces fsdp
        into_modules lora materialise merge_lora optimizer pipe_split resume rows shard split split_points styles
        to_csv to_state_dict transformers
    """,
}


@pytest.mark.parametrize("package", SURFACE)
def test_the_public_surface(package):
    assert import_module(package).__all__ == SURFACE[package].split()


def test_the_tables_have_a_row_for_every_effect_and_value():
    assert set(TABLE.effects) == set(get_args(effects.Effect))
    assert set(TABLE.values) == set(get_args(effects.Name))


@pytest.mark.parametrize("folder", ["schedules", "interop"])
def test_folders_at_the_top_are_linked_into_the_package(folder):
    link = ROOT / "fpipe" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder


def test_every_warning_shows_the_users_line():
    """`fpipe.errors.tracebacks.warn` finds it; a `stacklevel` is right for one way to the call alone."""
    calls = {
        name: [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and is_warn(node.func)]
        for name, tree in MODULES.items()
    }
    assert {name for name, lines in calls.items() if lines} == {"fpipe.errors.tracebacks"}


def is_warn(function):
    return isinstance(function, ast.Attribute) and ast.unparse(function) == "warnings.warn"
