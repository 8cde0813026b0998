"""A `transformers` config is enough to build a model of any input type, with its inputs and its loss."""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from stepscope.errors import StepscopeError
from stepscope.measure.flops import count_forward_flops
from stepscope.spec import HuggingFace, Scalar, Workload, build_case
from stepscope.step import Step, build
from stepscope.step.hf import check_config, load_config
from tests.cpu.test_step import CPU, loss_of, make

# The class built for each config that does not name one.
KINDS = {
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "deit": "DeiTForImageClassification",  # one of two that transformers has
    "videomae": "VideoMAEForVideoClassification",
    "audio-spectrogram-transformer": "ASTForAudioClassification",
}


class TestTransformers:
    """Random weights, no network."""

    TINY_GPT2: ClassVar[dict[str, int]] = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 60}
    TINY_BERT: ClassVar[dict[str, int]] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 60,
    }
    TINY_WHISPER: ClassVar[dict[str, int]] = {
        **{f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")},
        "d_model": 32,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_source_positions": 20,
        "vocab_size": 60,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    }
    TINY_ONES: ClassVar[dict[str, dict[str, int]]] = {
        "gpt2": TINY_GPT2,
        "bert": TINY_BERT,
        "t5": {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 60},
        "granitemoe": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 60,
        },
        "whisper": TINY_WHISPER,
        "vit": {**TINY_BERT, "image_size": 32, "patch_size": 8},
        "deit": {**TINY_BERT, "image_size": 32, "patch_size": 8},
        "videomae": {**TINY_BERT, "image_size": 32, "patch_size": 8, "num_frames": 4},
        "audio-spectrogram-transformer": {**TINY_BERT, "max_length": 64},
    }

    def make_tiny(self, config: str, **settings: Scalar) -> Step:
        context = {"context": 16} if config in ("gpt2", "bert", "t5", "granitemoe", "whisper") else {}
        sizes = {name: value for name, value in self.TINY_ONES[config].items() if name != "vocab_size" or context}
        run: dict[str, Scalar] = {"batch": 2, "device": "cpu", **context, **settings}
        return build(build_case({**run, "hf": config, "set": sizes}).workload, CPU)

    def test_model_type_with_overrides_trains(self) -> None:
        step = make(hf="gpt2", set=self.TINY_GPT2, checkpoint="block")
        first = loss_of(step)
        for _ in range(3):
            step.run()
        assert loss_of(step) < first

    @pytest.mark.parametrize("config", ["gpt2", "bert", "t5"])
    def test_sizes_come_from_the_config(self, config: str) -> None:
        step = make(hf=config, set=self.TINY_ONES[config])
        assert (step.sizes.num_layers, step.sizes.d_model) == (2, 32)

    def test_derived_fields_follow_the_overrides(self) -> None:
        """A llama with 4 heads has 4 key/value heads, and a matching head size, by default."""
        config = load_config(HuggingFace(config="llama", arguments=(("hidden_size", 64), ("num_attention_heads", 4))))
        assert (config.num_key_value_heads, config.head_dim) == (4, 16)

    @pytest.mark.parametrize("attention", ["naive", "sdpa"])
    def test_attention_names_map_to_theirs(self, attention: str) -> None:
        step = make(hf="gpt2", set=self.TINY_GPT2, attention=attention)
        config = step.module.config
        assert getattr(config, "_attn_implementation", None) == {"naive": "eager", "sdpa": "sdpa"}[attention]

    def test_config_file_is_accepted(self, tmp_path: Path) -> None:
        from transformers import GPT2Config

        GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=60).save_pretrained(tmp_path)
        step = make(hf=str(tmp_path / "config.json"), mode="inference")
        step.run()
        assert step.parameters > 0

    @pytest.mark.parametrize(
        ("config", "overrides", "said"),
        [
            ("gtp2", {}, "did you mean `gpt2`"),
            ("gpt2", {"n_layers_": 2}, "no field `n_layers_`"),
            ("gpt2", {"kv_lora_rank": 2}, "expected a field of GPT2Config\nhint: remove --set kv_lora_rank"),
            ("phi3", {"vocab_size": 60, "num_hidden_layers": 1}, "hint: --set pad_token_id=0"),
            ("gpt2", {"n_positions": 8}, "`8` positions"),
            ("sam", {}, "from its config alone"),
            ("vit", {}, "does not support `--context`"),
            ("whisper", {"vocab_size": 60}, "`pad_token_id` 50256"),
            ("meta-llama/Llama-3.1-8B", {}, "--hf llama"),
            ("meta-llama/Llama-3.1-8B", {}, "downloads nothing"),
            ("nobody/config.json", {}, "not found: `nobody/config.json`"),
            ("./nobody", {}, "not found: `./nobody`"),
        ],
    )
    def test_invalid_configs_raise(self, config: str, overrides: dict[str, Scalar], said: str) -> None:
        with pytest.raises(StepscopeError) as raised:
            make(hf=config, set=overrides)
        assert said in str(raised.value)

    def test_a_model_that_refuses_its_config_without_a_word_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise AssertionError

        monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", refuse)
        with pytest.raises(StepscopeError, match=r"cannot build GPT2LMHeadModel .*\n.*AssertionError"):
            make(hf="gpt2", set=self.TINY_GPT2)

    @pytest.mark.parametrize(("config", "kind"), [*KINDS.items()])
    @pytest.mark.parametrize("mode", ["train", "inference"])
    def test_config_selects_the_head_with_its_loss(self, config: str, kind: str, mode: str) -> None:
        step = self.make_tiny(config, mode=mode)
        assert type(step.module).__name__ == kind
        step.run()
        if mode == "train":
            first = loss_of(step)
            for _ in range(3):
                step.run()
            assert loss_of(step) < first
        assert count_forward_flops(step) > 0

    @pytest.mark.parametrize(
        ("config", "has_tokens"), [("t5", True), ("whisper", True), ("bert", True), ("vit", False)]
    )
    def test_tokens_are_counted_if_the_model_has_them(self, config: str, has_tokens: bool) -> None:
        step = self.make_tiny(config, mode="inference")
        assert (step.has_tokens, step.has_samples) == (has_tokens, True)

    def test_context_is_the_length_of_input_and_output(self) -> None:
        tokens = {}
        for context in (8, 16):
            step = self.make_tiny("t5", context=context)
            (inputs,) = step.inputs
            tokens[context] = {inputs[name].shape for name in ("input_ids", "labels")}
        assert tokens == {8: {(2, 8)}, 16: {(2, 16)}}

    def test_masked_model_predicts_only_some_tokens(self) -> None:
        (inputs,) = self.make_tiny("bert").inputs
        asked = inputs["labels"] != -100
        assert 0 < asked.sum() < asked.numel() / 4
        assert torch.equal(inputs["labels"][asked], inputs["input_ids"][asked])

    def test_head_is_the_one_that_a_config_file_names(self, tmp_path: Path) -> None:
        fields = {**self.TINY_BERT, "model_type": "bert", "architectures": ["BertForSequenceClassification"]}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        step = make(hf=str(tmp_path))
        assert type(step.module).__name__ == "BertForSequenceClassification"
        step.run()

    @pytest.mark.parametrize(("config", "is_as_before"), [("gpt2", True), ("bert", False)])
    def test_only_decoders_keep_their_earlier_digest(self, config: str, is_as_before: bool) -> None:
        """A `bert` used to be built as a decoder: earlier measurements are not comparable."""
        spec = HuggingFace(config=config)
        before = hashlib.sha256(load_config(spec).to_json_string(use_diff=False).encode()).hexdigest()[:16]
        assert (check_config(Workload(model=spec), spec)[0] == before) == is_as_before

    def test_local_directory_is_not_mistaken_for_a_hub_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "configs").mkdir()
        monkeypatch.chdir(tmp_path)
        with pytest.raises(StepscopeError, match="not found: `configs/llama`"):
            make(hf="configs/llama")

    @pytest.mark.parametrize("config", ["t5", "granitemoe", "whisper", "vit"])
    def test_encoder_and_decoder_layers_are_checkpointed(self, config: str) -> None:
        plain, saved = (
            self.make_tiny(config, mode="forward-backward", attention="naive", checkpoint=one)
            for one in ("none", "block")
        )
        for step in (plain, saved):
            step.module.eval()  # dropout would draw other masks
            step.run()
        for a, b in zip(plain.module.parameters(), saved.module.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)

    def test_pipe_is_rejected_without_waiting(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "config.json")
        with pytest.raises(StepscopeError, match="not a transformers config") as refused:
            make(hf=str(tmp_path))
        assert "regular file" in refused.value.detail

    def test_config_may_contain_infinity(self, tmp_path: Path) -> None:
        """As the configs of mamba2 do, written by transformers."""
        (tmp_path / "config.json").write_text('{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}')
        assert load_config(HuggingFace(config=str(tmp_path))).time_step_limit[1] == math.inf

    def test_file_that_is_not_a_config_raises(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(StepscopeError, match="not a transformers config"):
            make(hf=str(tmp_path / "config.json"))
