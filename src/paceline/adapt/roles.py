"""Which parts play in a training script: models, optimizers, loaders, and the loops that train.

Leaves out how a value is followed to what made it (`script.py`).
"""

import ast
from functools import cached_property

from paceline.adapt.script import Place, Script

Loop = ast.For | ast.While


class Roles:
    """The parts of one script; everything is looked up lazily and kept."""

    def __init__(self, script: Script) -> None:
        self._script = script

    # --- what is what --------------------------------------------------------------------------

    @cached_property
    def optimizers(self) -> list[ast.Call]:
        """The calls that make an optimizer."""
        found = []
        for call in self._script.calls:
            full = self._script.qualified(call.func) or ""
            last = full.rsplit(".", 1)[-1]
            by_name = (
                full.startswith("torch.optim.")
                and "lr_scheduler" not in full
                and "swa_utils" not in full
                and last[:1].isupper()
                and last != "Optimizer"
            )
            if by_name or (call.args and self._takes_parameters(call) and self._steps(call)):
                found.append(call)
        return found

    def _takes_parameters(self, call: ast.Call) -> bool:
        first = call.args[0]
        return (
            isinstance(first, ast.Call)
            and isinstance(first.func, ast.Attribute)
            and first.func.attr == "parameters"
            and "clip_grad" not in (self._script.dotted(call.func) or "")
        )

    def _steps(self, call: ast.Call) -> bool:
        """Whether the script calls `.step()` on what the call returns."""
        return any(
            isinstance(other.func, ast.Attribute)
            and other.func.attr == "step"
            and call in self._script.origins(other.func.value)
            for other in self._script.calls
        )

    def is_optimizer(self, node: ast.expr) -> bool:
        return bool(self._script.origins(node) & set(self.optimizers))

    def model_names_in(self, optimizer: ast.Call) -> list[ast.expr]:
        """The names of modules whose parameters an optimizer gets, as it spells them."""
        found: list[ast.expr] = []
        seen: set[ast.AST] = set()
        todo: list[ast.AST] = [*optimizer.args[:1], *(k.value for k in optimizer.keywords)]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if isinstance(node, (ast.Name, ast.Attribute)) and self._is_module(node):
                found.append(node)
                continue
            if isinstance(node, (ast.Name, ast.Attribute)):
                place = self._script.place(node)
                bound = self._script.bindings.get(place, []) if place is not None else []
                todo.extend(each.value for each in bound if not isinstance(each.stmt, ast.Call))
                todo.extend(self._appended(place))
            if isinstance(node, ast.Attribute) and self._is_module(node.value):
                todo.append(node.value)
                continue
            todo.extend(ast.iter_child_nodes(node))
        return found

    def _appended(self, place: Place | None) -> list[ast.AST]:
        """What a list is filled with by loops over `named_parameters()`: the loops' iterables."""
        if place is None:
            return []
        found: list[ast.AST] = []
        for call in self._script.calls:
            func = call.func
            if not isinstance(func, ast.Attribute) or func.attr not in ("append", "extend"):
                continue
            if any(self._script.place(each) == place for each in ast.walk(func.value)):
                found.extend(
                    loop.iter for loop in self._script.up(call) if isinstance(loop, ast.For)
                )
                found.extend(call.args)
        return found

    def _is_module(self, node: ast.expr) -> bool:
        return any(self._makes_module(origin) for origin in self._script.origins(node))

    def _makes_module(self, origin: ast.expr) -> bool:
        if not isinstance(origin, ast.Call):
            return False
        name = self._script.dotted(origin.func) or ""
        if name in self._script.classes:
            return self._script.is_module_class(name)
        full = self._script.qualified(origin.func) or ""
        if full.startswith("transformers."):
            owner = full.split(".")[1]
            return not owner.endswith(("Tokenizer", "TokenizerFast", "Config", "Processor")) and (
                owner.startswith("AutoModel") or "For" in owner or owner.endswith("Model")
            )
        return (
            full.startswith(("torch.nn.", "torchvision.models.", "timm.create_model", "torch.hub."))
            or name.endswith("get_peft_model")
            or (origin in self._trained_by_name)
        )

    @cached_property
    def _trained_by_name(self) -> set[ast.expr]:
        """What `.parameters()` is called on in an optimizer's arguments: a module by that alone."""
        found: set[ast.expr] = set()
        for call in self.optimizers:
            for node in ast.walk(call):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in ("parameters", "named_parameters")
                ):
                    found |= self._script.origins(node.func.value)
        return found

    @cached_property
    def models(self) -> frozenset[ast.expr]:
        """The calls that make the modules which are trained."""
        return frozenset(
            origin
            for optimizer in self.optimizers
            for name in self.model_names_in(optimizer)
            for origin in self._script.origins(name)
            if self._makes_module(origin)
        )

    def is_model(self, node: ast.expr) -> bool:
        return bool(self._script.origins(node) & self.models)

    def is_loader(self, node: ast.expr) -> bool:
        return any(self.makes_loader(origin) for origin in self._script.origins(node))

    def makes_loader(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and (self._script.qualified(node.func) or "") in (
            "torch.utils.data.DataLoader",
            "torch.utils.data.dataloader.DataLoader",
        )

    def makes_scaler(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and (self._script.qualified(node.func) or "").endswith(
            ".GradScaler"
        )

    def is_scaler(self, node: ast.expr) -> bool:
        return any(self.makes_scaler(origin) for origin in self._script.origins(node))

    # --- the loops that train ------------------------------------------------------------------

    @cached_property
    def batch_loops(self) -> list[ast.For]:
        """Loops over a DataLoader in which a backward pass happens, outermost first."""
        return [
            node
            for node in ast.walk(self._script.tree)
            if isinstance(node, ast.For)
            and self.is_loader(node.iter)
            and any(self._script.reaches_backward(each) for each in node.body)
        ]

    @cached_property
    def other_loops(self) -> list[Loop]:
        """Innermost loops with a backward pass that go over no DataLoader."""
        found: list[Loop] = []
        for call in self._script.backwards:
            for node in self._script.up(call):
                if isinstance(node, (ast.For, ast.While)):
                    if node not in self.batch_loops and node not in found:
                        found.append(node)
                    break
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    break
        return found

    @cached_property
    def train_loaders(self) -> list[ast.Call]:
        """The DataLoader calls whose batches are trained on."""
        loaders = {
            origin
            for loop in self.batch_loops
            for origin in self._script.origins(loop.iter)
            if isinstance(origin, ast.Call) and self.makes_loader(origin)
        } | {
            origin
            for call in self.next_calls
            for origin in self._script.origins(call.args[0])
            if isinstance(origin, ast.Call) and self.makes_loader(origin)
        }
        return sorted(loaders, key=lambda call: call.lineno)

    @cached_property
    def next_calls(self) -> list[ast.Call]:
        """`next(batches)` in a loop that trains."""
        return [
            call
            for call in self._script.calls
            if isinstance(call.func, ast.Name)
            and call.func.id == "next"
            and call.args
            and self.is_loader(call.args[0])
            and any(
                isinstance(loop, (ast.For, ast.While)) and self._script.reaches_backward(loop)
                for loop in self._script.up(call)
            )
        ]

    @cached_property
    def training(self) -> set[ast.AST]:
        """Every node of the loops that train, and of the functions called in them."""
        found: set[ast.AST] = set()
        roots: list[ast.AST] = [each for loop in self.batch_loops for each in loop.body]
        for call in self.next_calls:
            for node in self._script.up(call):
                if isinstance(node, (ast.For, ast.While)) and self._script.reaches_backward(node):
                    roots.extend(node.body)
                    break
        while roots:
            root = roots.pop()
            if root in found:
                continue
            for node in ast.walk(root):
                found.add(node)
                if isinstance(node, ast.Call):
                    called = self._script.called(node)
                    if (
                        called is not None
                        and called not in found
                        and self._script.reaches_backward(called)
                    ):
                        roots.append(called)
        return found
