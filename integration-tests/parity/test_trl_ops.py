"""Our functions inside TRL 1.16's own trainers: the same losses, the same trained weights.

Run in the session ``parity``, which installs ``trl==1.16.0`` beside the wheels.
"""

import copy
import string

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.trainer.utils import selective_log_softmax as trl_selective_log_softmax

from closeness import assert_close
from rl_ops import linear_selective_log_softmax, losses, selective_log_softmax

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *string.ascii_lowercase]


@pytest.fixture
def tokenizer():
    built = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=built, **special)


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.5,
    )  # fmt: skip
    # TRL makes its reference by loading again from the folder that the model came from.
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return LlamaForCausalLM.from_pretrained(tmp_path / "model")


def arguments(folder):
    return {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 4,
        "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "use_cpu": True,
        "bf16": False, "save_strategy": "no", "gradient_checkpointing": False, "disable_tqdm": True,
    }  # fmt: skip


def use_ours(model, temperature=1.0):
    """Give the model's outputs our log-probs and entropy in place of TRL's."""
    theirs = model.forward

    def forward(*args, fused_lm_head=False, labels=None, **kwargs):
        if not fused_lm_head:
            return (
                theirs(*args, labels=labels, **kwargs)
                if labels is not None
                else theirs(*args, **kwargs)
            )
        outputs = theirs(*args, fused_lm_head=True, labels=labels, **kwargs)
        inputs = {
            n: kwargs[n] for n in ("input_ids", "attention_mask", "position_ids") if n in kwargs
        }
        hidden = model.model(**inputs, use_cache=False).last_hidden_state[:, :-1]
        targets, mask = labels[:, 1:], labels[:, 1:] != -100
        scored = linear_selective_log_softmax(
            hidden,
            model.lm_head.weight,
            targets.clamp(min=0),
            temperature=temperature,
            return_entropy=True,
        )
        outputs.log_probs = torch.where(mask, scored.logps, 0.0)
        outputs.entropy = torch.where(mask, scored.entropy, 0.0)
        count = kwargs.get("num_items_in_batch")
        outputs.loss = losses.nll(scored.logps, mask).sum() / (
            mask.sum() if count is None else count
        )
        forward.calls += 1
        return outputs

    forward.calls = 0
    model.forward = forward
    return forward


def trained(make, model, temperature=1.0):
    """Train with TRL alone and with our functions; return losses and weights of both."""
    results = []
    for swap in (False, True):
        copied = copy.deepcopy(model)
        torch.manual_seed(0)
        trainer = make(copied)
        forward = use_ours(copied, temperature) if swap else None
        trainer.train()
        assert forward is None or forward.calls > 0
        logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        weights = torch.cat([p.detach().flatten() for p in copied.parameters()])
        results.append((logged, weights))
    (theirs, their_weights), (ours, our_weights) = results
    assert len(theirs) == 3
    assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert_close(our_weights, their_weights, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_sft_trainer(model, tokenizer, tmp_path, loss_type):
    rows = Dataset.from_dict({"text": ["a b c d e", "f g h", "i j k l", "m n o p q r"] * 4})
    config = SFTConfig(**arguments(tmp_path), loss_type=loss_type, max_length=16)
    trained(lambda m: SFTTrainer(m, config, train_dataset=rows, processing_class=tokenizer), model)


PAIRS = {
    "prompt": ["a b", "c d e", "f", "g h"],
    "chosen": ["i j k", "l m", "n o p q", "r"],
    "rejected": ["s t", "u v w x", "y z", "a a a"],
}


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "apo_zero"])
def test_dpo_trainer(model, tokenizer, tmp_path, loss_type):
    rows = Dataset.from_dict({name: values * 3 for name, values in PAIRS.items()})
    config = DPOConfig(**arguments(tmp_path), loss_type=loss_type, max_length=16)
    trained(
        lambda m: DPOTrainer(m, None, config, train_dataset=rows, processing_class=tokenizer), model
    )


def test_kto_trainer(model, tokenizer, tmp_path):
    rows = Dataset.from_dict(
        {
            "prompt": PAIRS["prompt"] * 3,
            "completion": PAIRS["chosen"] * 3,
            "label": [True, False, False, True] * 3,
        }
    )
    config = KTOConfig(**arguments(tmp_path), max_length=16)
    trained(
        lambda m: KTOTrainer(m, None, config, train_dataset=rows, processing_class=tokenizer), model
    )


def test_grpo_trainer(model, tokenizer, tmp_path):
    rows = Dataset.from_dict({"prompt": ["a b", "c d e", "f", "g h"] * 3})
    config = GRPOConfig(
        **arguments(tmp_path), num_generations=4, max_completion_length=6, temperature=0.7, beta=0.1
    )

    def reward(completions, **kwargs):
        return [float(len(text)) for text in completions]

    def make(m):
        return GRPOTrainer(m, reward, config, train_dataset=rows, processing_class=tokenizer)

    trained(make, model, temperature=0.7)


@pytest.mark.parametrize(
    ("loss_type", "loss", "mode", "options"),
    [
        ("grpo", losses.grpo, "sequence_mean", {}),
        ("bnpo", losses.bnpo, "token_mean", {}),
        ("dr_grpo", losses.dr_grpo, "constant", {}),
        ("dapo", losses.dapo, "token_mean", {}),
        ("cispo", losses.cispo, "token_mean", {"epsilon_high": 1.1}),
        ("sapo", losses.sapo, "sequence_mean", {}),
        ("vespo", losses.vespo, "token_mean", {}),
        ("gspo", losses.gspo, "sequence_mean", {"epsilon": 0.2, "epsilon_high": None}),
        ("luspo", losses.luspo, "sequence_mean_token_sum", {"epsilon": 0.2, "epsilon_high": None}),
    ],
)
def test_policy_losses_are_those_of_grpo_trainer(
    model, tokenizer, tmp_path, loss_type, loss, mode, options
):
    sequence = loss_type in ("gspo", "luspo")
    extra = {"importance_sampling_level": "sequence"} if sequence else {}
    if loss_type == "cispo":
        extra["epsilon_high"] = 0.1
    config = GRPOConfig(
        **arguments(tmp_path), num_generations=4, max_completion_length=6, beta=0.0,
        loss_type="grpo" if loss_type == "gspo" else loss_type, **extra,
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": ["a b", "c d"]})
    trainer = GRPOTrainer(
        model, lambda completions, **_: [0.0] * len(completions), config, train_dataset=rows,
        processing_class=tokenizer,
    )  # fmt: skip
    if loss_type == "cispo":
        trainer.epsilon_high = 1.1
    prompt, completion = torch.randint(4, 30, (4, 3)), torch.randint(4, 30, (4, 6))
    mask = (torch.arange(6) < torch.tensor([[6], [2], [4], [1]])).long()
    hidden = model.model(torch.cat([prompt, completion], 1)).last_hidden_state[:, 2:-1]
    logps = linear_selective_log_softmax(hidden, model.lm_head.weight, completion)
    old = (logps + 0.3 * torch.randn(4, 6)).detach()
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5])
    batch = {
        "prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt), "completion_ids": completion,
        "completion_mask": mask, "advantages": advantages, "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    model.eval()  # no accumulation in evaluation, and no dropout either way
    theirs = trainer.compute_loss(model, batch)
    longest = 6 if mode == "constant" else None
    total = losses.loss_denominator(mask, mode=mode, max_length=longest)
    values = loss(logps, old, advantages, mask, **options)
    ours = losses.reduce_loss(values, mask, mode=mode, denominator=total)
    assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    parameters = list(model.parameters())
    pairs = zip(*(torch.autograd.grad(x, parameters) for x in (ours, theirs)), strict=True)
    for mine, other in pairs:
        assert_close(mine, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("loss_type", "options"),
    [
        ("sigmoid", {}), ("hinge", {}), ("ipo", {"lengths": True}),
        ("exo_pair", {"label_smoothing": 0.1}),
        ("nca_pair", {}), ("robust", {"label_smoothing": 0.1}), ("bco_pair", {}), ("sppo_hard", {}),
        ("aot", {}), ("aot_unpaired", {}), ("apo_zero", {}), ("apo_down", {}), ("discopop", {}),
        ("sigmoid_norm", {"lengths": True}),
    ],
)  # fmt: skip
def test_preference_losses_are_those_of_dpo_trainer(model, tokenizer, tmp_path, loss_type, options):
    options = dict(options)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.05 * torch.randn_like(p))
    smoothing = {n: options[n] for n in options if n == "label_smoothing"}
    config = DPOConfig(**arguments(tmp_path), loss_type=loss_type, max_length=16, **smoothing)
    rows = Dataset.from_dict(PAIRS)
    trainer = DPOTrainer(model, reference, config, train_dataset=rows, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    model.eval()
    theirs = trainer.compute_loss(model, dict(batch))
    ids, mask = batch["input_ids"], batch["completion_mask"]

    def sums(scored):
        attention = batch["attention_mask"]
        hidden = scored.model(ids, attention_mask=attention).last_hidden_state[:, :-1]
        logps = linear_selective_log_softmax(hidden, scored.lm_head.weight, ids[:, 1:])
        return losses.sequence_logps(logps, mask[:, 1:]).chunk(2)

    with torch.no_grad():
        known = sums(reference)
    if options.pop("lengths", False):
        lengths = mask.sum(1).chunk(2)
        options |= {"chosen_lengths": lengths[0], "rejected_lengths": lengths[1]}
    ours = getattr(losses, loss_type)(*sums(model), *known, beta=config.beta, **options).mean()
    assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_selective_log_softmax_takes_the_place_of_theirs():
    logits, index = torch.randn(2, 5, 64), torch.randint(0, 64, (2, 5))
    wanted = trl_selective_log_softmax(logits, index, temperature=0.7)
    assert_close(selective_log_softmax(logits, index, temperature=0.7), wanted)
