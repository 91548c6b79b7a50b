// `Answer`: one answer while it arrives: its text, reasoning and calls, and the figures of its footer.

import { count } from "../dom.js";
import { LOOP } from "../facts.js";

// From the first to the last piece of an answer: in less time several tokens came in one piece, and there is no rate.
const MIN_RATE_MS = 20;

// The loop at the end of a text, the shortest unit first, as `engine chat` finds it; null if there is none.
export function findLoop(text) {
  for (let period = 1; text.length >= LOOP.min_chars && period * LOOP.min_times <= text.length; period++) {
    const start = text.length - Math.max(LOOP.min_chars, LOOP.min_times * period), end = text.length - period;
    if (text.slice(start, end) !== text.slice(start + period)) continue;
    const unit = text.slice(end);
    let times = Math.floor((text.length - start) / period);
    while (text.endsWith(unit.repeat(times + 1))) times++;
    return { unit, times };
  }
  return null;
}

export class Answer {
  text = "";
  reasoning = "";
  calls = [];
  usage = null;
  finishReason = null;
  warnings = [];
  progress = null;  // of the prompt: processed, total
  loop = null;  // what it repeats
  #tail = "";
  #started = performance.now();
  #first = null;
  #last = 0;

  // Takes one event of the stream; whether it brought the first token.
  add(event) {
    if (event.usage) this.usage = event.usage;
    if (event.prompt_progress) this.progress = event.prompt_progress;
    if (event.warnings?.length) this.warnings = event.warnings;
    const choice = event.choices?.[0];
    if (!choice) return false;
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    const delta = choice.delta ?? {}, reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    const isFirst = this.#first === null && Boolean(delta.content || reasoning || delta.tool_calls?.length);
    if (delta.content || reasoning || delta.tool_calls?.length) {
      this.#last = performance.now();
      this.#first ??= this.#last;
    }
    this.text += delta.content ?? "";
    this.reasoning += reasoning;
    if (!this.finishReason && (delta.content || reasoning)) {
      this.#tail = (this.#tail + (delta.content ?? "") + reasoning).slice(-LOOP.window_chars);
      this.loop = findLoop(this.#tail);
    }
    for (const piece of delta.tool_calls ?? []) this.#addCall(piece);
    return isFirst;
  }

  #addCall(piece) {
    const call = this.calls[piece.index ?? 0] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
    if (piece.id) call.id = piece.id;
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
  }

  get isEmpty() { return !this.text && !this.reasoning && !this.calls.length; }

  // `first token 41 ms · 62.3 tok/s · 512 in (480 cached) · 211 out · context 723/32,768`.
  footer(maxContext) {
    const parts = [], usage = this.usage;
    if (this.#first !== null) parts.push(`first token ${Math.round(this.#first - this.#started)} ms`);
    if (usage && this.#first !== null && usage.completion_tokens > 1) {
      const elapsedMs = this.#last - this.#first;
      if (elapsedMs >= MIN_RATE_MS) parts.push(`${((usage.completion_tokens - 1) * 1000 / elapsedMs).toFixed(1)} tok/s`);
    }
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens, used = usage.prompt_tokens + usage.completion_tokens;
      parts.push(`${count(usage.prompt_tokens)} in${cached ? ` (${count(cached)} cached)` : ""}`, `${count(usage.completion_tokens)} out`);
      parts.push(maxContext ? `context ${count(used)}/${count(maxContext)}` : `context ${count(used)}`);
    }
    return parts.join(" · ");
  }

  // Why it ended, where the reader should know, and the server's warnings; "" for an ordinary end.
  note(maxContext) {
    return [this.#end(maxContext), ...this.warnings].filter(Boolean).join(" ");
  }

  #end(maxContext) {
    const used = this.usage ? this.usage.prompt_tokens + this.usage.completion_tokens : 0;
    if (this.loop) {
      return `Stopped: the answer repeats the same ${count(this.loop.unit.length)} characters ${count(this.loop.times)} times. `
        + "A higher temperature or a repetition penalty of 1.1 helps; Continue lets it go on.";
    }
    if (this.finishReason === "length") {
      return maxContext && used >= maxContext
        ? `The answer ends here: the context of ${count(maxContext)} tokens is full. Begin a new conversation, or edit an earlier message.`
        : "The answer has reached its limit; raise “Longest answer” in the settings.";
    }
    if (this.finishReason === "abort") return "The server ended this answer.";
    return null;
  }
}
