"""Keys that older versions of ddp_lab had elsewhere."""

from omegaconf import DictConfig, OmegaConf, open_dict

# The keys that have moved, and where they are now. Typed, the old one is refused with the new one.
MOVED = {"strategy.checkpoint_activations": "checkpoint_activations"}


def move_keys(cfg: DictConfig) -> None:
    """Move the keys of a config that an older version has recorded to where they are now."""
    with open_dict(cfg):
        for old, new in MOVED.items():
            group, _, key = old.rpartition(".")
            node = OmegaConf.select(cfg, group)
            if isinstance(node, DictConfig) and key in node:
                OmegaConf.update(cfg, new, node.pop(key))
