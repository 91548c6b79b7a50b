// `rates` and `memory`: figures of the server's report, as `engine top` has them. Pure.

// Per second, between two reports; null if there is no rate, as after a restart.
export function rates(before, after) {
  const span = after.sent_s - before.sent_s;
  if (!(span > 0) || after.num_steps_total < before.num_steps_total) return null;
  const grown = (name) => after[name] - before[name], prompt = grown("prompt_tokens_total");
  return {
    output: grown("generation_tokens_total") / span,
    prompt: prompt / span,
    cached: prompt > 0 ? grown("cached_tokens_total") / prompt : 0,
    steps: grown("num_steps_total") / span,
    busy: Math.min(1, grown("step_s_total") / span),
    evicted: grown("evicted_tokens_total") / span,
  };
}

export function memory(report) {
  const total = report.kv_total_tokens, used = report.kv_used_tokens, cached = report.kv_cached_tokens;
  const share = (tokens) => total > 0 ? tokens / total : 0;
  return { total, used, cached, free: Math.max(0, total - used - cached), share };
}

export const percent = (share) => `${Math.round(share * 100)} %`;

export const shortId = (id, length = 13) => id.length <= length ? id : `${id.slice(0, length - 6)}…${id.slice(-5)}`;
