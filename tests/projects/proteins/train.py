"""python train.py fit --config config.yaml"""

from data import Proteins
from lightning.pytorch.cli import LightningCLI
from model import ProteinLM


def main(args: list[str] | None = None) -> LightningCLI:
    return LightningCLI(
        ProteinLM,
        Proteins,
        subclass_mode_model=True,
        auto_configure_optimizers=False,
        save_config_callback=None,
        args=args,
    )


if __name__ == "__main__":
    main()
