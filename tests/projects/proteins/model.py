"""A small protein language model: BERT with a masked-residue loss."""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import BertConfig, BertForMaskedLM

PAD, MASK, FIRST_RESIDUE, VOCABULARY = 0, 1, 2, 22


class ProteinLM(LightningModule):
    def __init__(self, num_layers: int = 4, learning_rate: float = 1e-2, warmup_steps: int = 2):
        super().__init__()
        self.save_hyperparameters()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=64,
        )
        self.network = BertForMaskedLM(config)

    def forward(self, residues: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.network(residues, attention_mask=attention_mask).logits

    def masked_loss(self, residues: Tensor) -> Tensor:
        hidden = (torch.rand(residues.shape, device=self.device) < 0.15) & (residues >= FIRST_RESIDUE)
        hidden[:, 0] = True
        logits = self(residues.masked_fill(hidden, MASK), (residues != PAD).long())
        return nn.functional.cross_entropy(logits[hidden], residues[hidden])

    def training_step(self, residues: Tensor, batch_idx: int) -> Tensor:
        loss = self.masked_loss(residues)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, residues: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.masked_loss(residues))

    def make_optimizer(self) -> torch.optim.Optimizer:
        rate = self.hparams.learning_rate
        # The decoder's matrix is that of the embeddings.
        head = [p for name, p in self.network.cls.named_parameters() if not name.endswith("decoder.weight")]
        return torch.optim.AdamW(
            [{"params": self.network.bert.parameters(), "lr": rate}, {"params": head, "lr": 2 * rate}]
        )

    def configure_optimizers(self):
        optimizer = self.make_optimizer()
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.hparams.warmup_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
