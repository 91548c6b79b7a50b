// `LivePanel`: the live requests and the KV memory, asked every two seconds while the panel is open.

import { button, count, make, seconds } from "../dom.js";
import { memory, percent, rates, shortId } from "./live.js";

const INTERVAL_MS = 2000;
const SEGMENTS = [["used", "requests"], ["cached", "prefix cache"], ["free", "free"]];

export class LivePanel {
  #timer = 0;
  #report = null;
  #isOpen = false;

  constructor(box, server, keys) {
    Object.assign(this, { box, server, keys });
    this.summary = make("dl", { className: "figures-list" });
    this.bar = make("div", { className: "bar", role: "img" });
    this.legend = make("p", { className: "hint" });
    this.alarm = make("p", { className: "error", role: "alert", hidden: true });
    this.table = make("div", { className: "wide", tabIndex: 0, role: "region", "aria-label": "Requests" });
    this.ask = make("div", { hidden: true });
    box.append(make("div", { className: "row title" }, make("h2", {}, "Live")), this.alarm,
      make("h3", {}, "KV memory"), this.bar, this.legend, this.summary, make("h3", {}, "Requests"), this.ask, this.table);
    document.addEventListener("visibilitychange", () => this.#schedule(0));
  }

  open(isOpen) {
    this.#isOpen = isOpen;
    this.#report = null;
    this.#schedule(0);
  }

  #schedule(delay = INTERVAL_MS) {
    clearTimeout(this.#timer);
    if (this.#isOpen && !document.hidden) this.#timer = setTimeout(() => this.#look(), delay);
  }

  async #look() {
    try {
      const info = await this.server.get("server_info", { admin: true });
      this.#showReport(info);
      await this.#lookAtRequests();
      this.alarm.hidden = !info.scheduler?.stalled;
      this.alarm.textContent = info.scheduler?.stalled ? `Stalled: ${info.scheduler.stalled}` : "";
    } catch (error) {
      this.alarm.hidden = false;
      this.alarm.textContent = error.message;
      if (error.wantsKey && !(await this.keys.ask())) return;
    }
    this.#schedule();
  }

  async #lookAtRequests() {
    try {
      const listed = await this.server.get("v1/requests", { admin: true });
      this.ask.hidden = true;
      this.#showRequests(listed);
    } catch (error) {
      if (!error.wantsAdminKey) throw error;
      if (!this.ask.hidden && this.ask.dataset.message === error.message) return;
      this.table.replaceChildren();
      this.ask.hidden = false;
      this.ask.dataset.message = error.message;
      const enter = async () => { if (await this.keys.ask({ admin: true })) { this.ask.dataset.message = ""; this.#schedule(0); } };
      this.ask.replaceChildren(make("p", { className: "note" }, error.message), button("Enter the admin key", enter));
    }
  }

  #showReport(info) {
    const report = info.scheduler ?? {};
    if (info.scheduler) {
      const kv = memory(report);
      this.bar.replaceChildren(...SEGMENTS.map(([name]) => {
        const part = make("span", { className: name });
        part.style.flexGrow = String(kv.share(kv[name]));
        return part;
      }));
      const words = SEGMENTS.map(([name, text]) => `${text} ${percent(kv.share(kv[name]))}`).join(" · ");
      this.bar.setAttribute("aria-label", `KV memory: ${words}`);
      this.legend.replaceChildren(...SEGMENTS.flatMap(([name, text]) =>
        [make("i", { className: name, "aria-hidden": "true" }), ` ${text} ${percent(kv.share(kv[name]))}  `]), ` of ${count(kv.total)} tokens`);
    }
    const figures = [
      ["running", `${count(report.num_running_reqs ?? 0)} of ${count(info.capacity.max_running_requests)}`],
      ["waiting", count(report.num_queue_reqs ?? 0)],
      ["swapped", count(report.num_swapped_reqs ?? 0)],
      ["retracted so far", count(report.retracted_reqs_total ?? 0)],
    ];
    const rate = this.#report && info.scheduler ? rates(this.#report, report) : null;
    this.#report = info.scheduler ?? null;
    const generates = !info.model_spec?.pooling;
    if (generates) figures.push(["output", rate ? `${count(Math.round(rate.output))} tok/s` : "…"]);
    figures.push([generates ? "prompts" : "texts", rate ? `${count(Math.round(rate.prompt))} tok/s, ${percent(rate.cached)} cached` : "…"],
      ["steps", rate ? `${rate.steps.toFixed(1)} /s, ${percent(rate.busy)} busy` : "…"],
      ["evicted", rate ? `${count(Math.round(rate.evicted))} tok/s` : "…"]);
    if (report.policy) figures.push(["policy", report.policy]);
    const why = Object.entries(report.waiting_by_reason ?? {}).sort((a, b) => b[1] - a[1]);
    if (why.length) figures.push(["why they wait", why.map(([name, number]) => `${name} ${number}`).join(", ")]);
    this.summary.replaceChildren(...figures.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  }

  #showRequests({ data, total }) {
    if (!total) { this.table.replaceChildren(make("p", { className: "hint" }, "No request is live.")); return; }
    const head = ["Id", "Phase", "Age", "TTFT", "Prompt", "Output", "Why"];
    const rows = data.map((each) => make("tr", {}, make("td", { className: "mono", title: each.id }, shortId(each.id)), make("td", {}, each.phase),
      make("td", {}, seconds(each.age_s)), make("td", {}, seconds(each.ttft_s)), make("td", {}, count(each.prompt_tokens)),
      make("td", {}, `${count(each.completion_tokens)}/${count(each.max_tokens)}`), make("td", {}, whyOf(each))));
    this.table.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col", title: text === "TTFT" ? "time to the first token" : null }, text)))),
      make("tbody", {}, ...rows)), ...(total > data.length ? [make("p", { className: "hint" }, `and ${count(total - data.length)} more`)] : []));
  }
}

function whyOf({ why, need, have, num_retractions: retractions }) {
  const words = why && (need || have) ? `${why} (need ${count(need)}, have ${count(have)})` : why;
  return retractions ? `retracted ${retractions}×${words ? "; " : ""}${words}` : words;
}
