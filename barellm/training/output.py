"""What a run writes besides checkpoints: metrics, trackers, samples, the curve and the final report. Rank 0 alone does."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from barellm.assembly.build import CompiledModel
from barellm.checkpoint import storage
from barellm.config import overrides
from barellm.evaluation import hellaswag, validation
from barellm.evaluation.scoring import Scorer
from barellm.evaluation.text import gzip_bits_per_byte, python_share, repetitive
from barellm.generation import decode, samplers
from barellm.training import console, curve, exponent_stats, inputs, metrics, report, stopping, trackers
from barellm.training.loop import Loop
from barellm.training.trackers import Tracking

FINAL_SAMPLES, FINAL_SHOWN = 6, 2
LEAST_ZIPPED = 1000  # bytes of text of which the rate of gzip says something: it writes 18 besides


class Output:
    """The output of rank 0, below `folder`."""

    def __init__(self, run: inputs.Inputs, folder: Path, compiled: CompiledModel) -> None:
        self.run, self.folder, self.compiled = run, folder, compiled
        self.config, self.data = run.config, run.data

    def metrics(self, step: int) -> metrics.Metrics:
        """Save the resolved configuration, and open metrics.jsonl with the rows up to `step`, where the run resumes."""
        resolved = json.dumps(overrides.to_json(self.config) | {"device": self.compiled.device}, indent=2) + "\n"
        storage.replace_file(self.folder / "config.json", resolved.encode())  # first: with it alone --resume works
        path, rows = self.folder / "metrics.jsonl", []
        if self.run.start is None:
            storage.replace_file(path, b"")
        else:
            rows = metrics.truncate(path, step=step)
        stats_file = exponent_stats.file_of(self.folder)
        if stats_file.exists():  # of the run that goes on, or of one that ended before its first checkpoint
            metrics.truncate(stats_file, step=step)
        return metrics.Metrics(path, rows=rows)

    def tracking(self, step: int) -> Tracking:
        names, config = trackers.chosen(self.config.train.track), overrides.flat(self.config)
        subject = trackers.subject(self.folder, project=self.config.preset, step=step, config=config) if names else None
        return Tracking(names, subject, say=self.run.console.line)

    def hellaswag(self, stop: stopping.Stopping) -> Callable[[], hellaswag.Result | None] | None:
        """A function that tries the model on HellaSwag, if the run shall."""
        task, scoring = self.run.hellaswag, self.run.scoring
        if task is None or scoring is None:
            return None
        scorer = Scorer(self.compiled.session, batch=scoring[0], seq=scoring[1])
        tell = self.run.console.evaluating
        return lambda: task.run(scorer, stop=lambda: bool(stop), report=tell(len(task.texts)))

    def samples(self, decoder: decode.Decoder, stop: stopping.Stopping, *, count: int, tokens: int, seed: int) -> list[str]:
        """Generate `count` sample texts, reproducible by `seed` and the run's own; [] if stopped, or without a text vocabulary."""
        if self.data.byte_lengths is None:  # shards of a vocabulary that is not here: ids, but no text
            return []
        tokenizer, prompt = self.data.tokenizer, self.data.prompt
        shown = tokenizer.decode(prompt) if self.data.examples else ""
        texts = []
        for i in range(count):
            how = samplers.Sampling(temperature=0.8, top_p=0.95, seed=(self.config.train.seed << 32) + (seed << 8) + i)
            ids = []
            for token in decoder.tokens(prompt, count=tokens, how=how):
                if stop:
                    return []
                if token in tokenizer.ends:
                    break
                ids.append(token)
            texts.append(shown + tokenizer.decode(ids))
        return texts

    def final_samples(self, decoder: decode.Decoder, stop: stopping.Stopping, step: int) -> list[str]:
        """Those that are not shown are only for tokenize's share."""
        most, tokens = (FINAL_SAMPLES if self.config.data.source == "stdlib" else FINAL_SHOWN, self.run.final_sample_tokens)
        count = max(1, min(most, tokens // inputs.FINAL_SAMPLE_TOKENS))
        return self.samples(decoder, stop, count=count, tokens=min(inputs.FINAL_SAMPLE_TOKENS, tokens // count), seed=step)

    def close(self, loop: Loop, result: validation.Result, texts: list[str], elapsed: Callable[[], float]) -> None:
        """Write the final samples (`texts`), result row and curve, and print the closing report. `elapsed()`: seconds so far."""
        say, step = self.run.console.line, loop.progress.step
        # Of the texts that are not one piece again and again, where there are such.
        shown = sorted(range(len(texts)), key=lambda i: repetitive(texts[i]))[:FINAL_SHOWN]
        for i, text in enumerate(texts):
            loop.record_sample(step, text, show=i in shown)
        row = self._result(loop, result, texts, seconds=elapsed())
        found = curve.Curve(self.config.preset, *curve.series(loop.metrics.rows))
        if not self.run.console.notebook:  # which shows the picture
            say(curve.terminal(found, ascii_only=not self.run.console.can_show(curve.GLYPHS)))
        image = self.folder / "loss.png"
        title = f"{self.config.preset}, {console.short(self.compiled.parameters)} parameters"
        try:
            if image.is_symlink():  # what it points to is not the run's
                storage.remove(image)
            curve.image(image, [replace(found, gzip=curve.gzip_line([row], y="loss"))], title=title)
        except OSError as error:  # the weights are safe; a picture is not worth the report
            say(f"warning: no curve in {image}: {error.strerror}")
        loop.record(row)
        for line in report.closing(row, self.folder, self.config, prompt_text=self.data.prompt_text):
            say(line)

    def _result(self, loop: Loop, result: validation.Result, texts: list[str], *, seconds: float) -> dict[str, Any]:
        """The result row of metrics.jsonl: final losses in nats, speed in tokens/s and sizes."""
        final: dict[str, Any] = {
            "kind": "result", "step": loop.progress.step, "preset": self.config.preset, "val_nats": result.nats,
            "val_bits_per_byte": result.bits_per_byte, "val_bytes": result.bytes,
        }  # fmt: skip
        if result.bytes:
            text = self.run.final_evaluator.text(self.data.tokenizer)
            final |= {"gzip_bits_per_byte": gzip_bits_per_byte(text)} if len(text) >= LEAST_ZIPPED else {}
        if self.config.data.source == "stdlib":
            final["tokenize_share"], final["tokenize_lines"] = python_share("\n".join(texts))
            final["tokenize_share_of_validation"], _ = python_share(text.decode("utf-8", "replace")[: 1 << 18])
        speeds = [row["tokens_per_s"] for row in loop.metrics.rows if row["kind"] == "train"]
        if loop.spikes.active:
            final["skipped_steps"] = loop.spikes.skipped
        return final | {
            "seconds": round(seconds, 2), "seconds_all_sessions": round(loop.progress.seconds, 2), "steps": loop.progress.step,
            "tokens_per_s": sorted(speeds)[len(speeds) // 2], "parameters": self.compiled.parameters, **self.compiled.meta(),
            "checkpoint": str(loop.saving.saved), "curve": str(loop.saving.folder.parent / "loss.png"),
        }  # fmt: skip


class Silent(Output):
    """The other ranks have the same weights and the same losses: one writes."""

    def metrics(self, step: int) -> metrics.Metrics:
        return metrics.Metrics(None, rows=[])

    def tracking(self, step: int) -> Tracking:
        return Tracking((), None, say=self.run.console.line)

    def hellaswag(self, stop: stopping.Stopping) -> None:
        return None

    def samples(self, decoder: decode.Decoder, stop: stopping.Stopping, *, count: int, tokens: int, seed: int) -> list[str]:
        return []

    def close(self, loop: Loop, result: validation.Result, texts: list[str], elapsed: Callable[[], float]) -> None:
        pass
