"""Random proteins: each residue tends to repeat the one before it."""

import torch
from lightning.pytorch import LightningDataModule
from model import FIRST_RESIDUE, VOCABULARY
from torch.utils.data import DataLoader


class Proteins(LightningDataModule):
    def __init__(self, count: int = 48, length: int = 24, batch_size: int = 8):
        super().__init__()
        self.count, self.length, self.batch_size = count, length, batch_size

    def setup(self, stage: str) -> None:
        draw = torch.Generator().manual_seed(0)
        residues = torch.randint(FIRST_RESIDUE, VOCABULARY, (self.count, self.length), generator=draw)
        repeats = torch.rand(self.count, self.length, generator=draw) < 0.7
        for place in range(1, self.length):
            residues[:, place] = torch.where(repeats[:, place], residues[:, place - 1], residues[:, place])
        self.residues = residues

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.residues, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.residues[: self.batch_size], self.batch_size)
