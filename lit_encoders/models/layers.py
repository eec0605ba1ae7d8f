"""Find the blocks of any module: what layer ranges count, whoever wrote the model."""

from __future__ import annotations

from torch import nn


def find_layers(module: nn.Module, layers_path: str | None = None) -> tuple[str, nn.ModuleList]:
    """Find the stack of blocks: the longest ``ModuleList`` of like blocks that hold trainable parameters.

    Args:
        module: any module, such as a LightningModule or a Hugging Face model.
        layers_path: dotted name of the list, where the longest is not meant.

    Returns:
        The list's dotted name and the list.

    Raises:
        ValueError: there is no such list, or a second one of at least half the length makes the choice unclear.

    >>> find_layers(nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])))[0]
    '0'
    """
    stacks = {
        name: child
        for name, child in module.named_modules()
        if isinstance(child, nn.ModuleList)
        and len({type(block) for block in child}) == 1
        and all(any(True for _ in block.parameters()) for block in child)
    }
    if layers_path is not None:
        if layers_path not in stacks:
            raise ValueError(f"layers_path must name a list of like blocks ({', '.join(stacks)}), got {layers_path!r}")
        return layers_path, stacks[layers_path]
    # A frozen stack (a teacher's, say) is no rival of one that trains.
    trainable = {n: s for n, s in stacks.items() if any(p.requires_grad for p in s.parameters())}
    stacks = trainable or stacks
    # A list inside a block of another list (experts, say) is no rival of the stack that holds it.
    outer = {
        name: stack
        for name, stack in stacks.items()
        if not any(name != other and name.startswith(f"{other}.") for other in stacks)
    }
    if not outer:
        raise ValueError(
            f"layers: {type(module).__name__} has no ModuleList of like blocks; name one with layers_path="
        )
    ranked = sorted(outer, key=lambda name: len(outer[name]), reverse=True)
    if len(ranked) > 1 and 2 * len(outer[ranked[1]]) >= len(outer[ranked[0]]):
        lengths = ", ".join(f"{name} ({len(outer[name])})" for name in ranked[:2])
        raise ValueError(f"layers: two lists of like size, {lengths}; name the one meant with layers_path=")
    return ranked[0], outer[ranked[0]]
