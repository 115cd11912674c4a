"""*Extraction run*: the one page an operator keeps open."""

from parts import FULL, GREEN, HALF, RED, YELLOW, Board, Chart, Query, Section, must_be_zero, process, quantiles, rates

E = 'job="tether-extract", instance=~"$extract"'
S = 'job="tether-server", instance=~"$server"'
P = 'job="tether-proxy", instance=~"$proxy"'

now = Section(
    "Now",
    [
        Chart("Run", "short", "What the run is doing. Incomplete means that it has ended without some sample.",
              [Query(f"max by (state) (tether_extract_state{{{E}}}) == 1", "{{state}}")], now=True, names=True),
        Chart("Progress", "percentunit", "Samples on disk of those wanted, earlier runs included.",
              [Query(f'sum(tether_extract_samples{{{E}, state="done"}})'
                     f' / sum(tether_extract_samples{{{E}, state=~"done|pending|failed"}})', "done")],
              now=True, decimals=2, maximum=1),
        Chart("Time left", "dtdurations", "Until all pending tokens are done at the mean rate of this run.",
              [Query(f"max(tether_extract_eta_seconds{{{E}}})", "time left")], now=True),
        Chart("Tokens/s now", "short", "Tokens a second over the last minute.",
              [Query(f"sum(tether:extract_tokens:rate1m{{{E}}})", "tokens/s")], now=True, decimals=0),
        Chart("Tokens/s mean", "short", "Tokens a second since extraction began.",
              [Query(f"sum(tether_extract_tokens_written_total{{{E}}}"
                     f" / (timestamp(tether_extract_tokens_written_total{{{E}}})"
                     f" - tether_extract_started_time_seconds{{{E}}}))", "tokens/s")], now=True, decimals=0),
        Chart("Mismatches", "short", "Dumps that were not their request's, as the proxy, the server and the client found. "
              "Anything but zero is a reason to stop and look.",
              [Query(f"sum(tether_extract_mismatches_total{{{E}}}) + sum(tether_proxy_mismatches_total{{{P}}})"
                     f" + sum(tether_server_token_mismatches_total{{{S}}})", "mismatches")],
              now=True, thresholds=must_be_zero()),
        Chart("Samples done", "short", "Samples on disk, earlier runs included.",
              [Query(f'sum(tether_extract_samples{{{E}, state="done"}})', "done")], now=True),
        Chart("Samples pending", "short", "Samples that the run has not got to.",
              [Query(f'sum(tether_extract_samples{{{E}, state="pending"}})', "pending")], now=True),
        Chart("Samples failed", "short", "Rows that have no file because of a failure. failures.jsonl has each.",
              [Query(f'sum(tether_extract_samples{{{E}, state="failed"}})', "failed")],
              now=True, thresholds=[(None, GREEN), (1, YELLOW)]),
        Chart("Room left at the end", "bytes", "Bytes free on the output's disk less what the pending samples will take.",
              [Query(f"min(tether_extract_output_free_bytes{{{E}}} - tether_extract_output_needed_bytes{{{E}}})",
                     "room")], now=True, minimum=None, thresholds=[(None, RED), (0, YELLOW), (50e9, GREEN)]),
        Chart("Since the last sample", "s", "Seconds since a sample was last done or given up.",
              [Query(f"max(time() - tether_extract_last_progress_time_seconds{{{E}}})", "ago")],
              now=True, thresholds=[(None, GREEN), (60, YELLOW), (300, RED)]),
        Chart("Alerts", "short", "Tether's alerts that fire now.",
              [Query('count(ALERTS{alertname=~"Tether.*", alertstate="firing"}) or vector(0)', "firing")],
              now=True, thresholds=must_be_zero()),
    ],
)

speed = Section(
    "Speed",
    [
        Chart("Tokens per second", "short", "Now, the mean of the run, and the median of its first hour. The alert "
              "TetherSlow compares the first with 70 % of the last.",
              [Query(f"sum(tether:extract_tokens:rate1m{{{E}}})", "now"),
               Query(f"sum(tether_extract_tokens_written_total{{{E}}}"
                     f" / (timestamp(tether_extract_tokens_written_total{{{E}}})"
                     f" - tether_extract_started_time_seconds{{{E}}}))", "mean"),
               Query(f"sum(tether:extract_tokens:first_hour_median{{{E}}})", "first hour's median")], width=HALF),
        Chart("Samples per second", "short", "Samples whose file was written and recorded.",
              [Query(f"sum(tether:extract_samples:rate1m{{{E}}})", "now")], width=HALF),
        Chart("Tokens done and pending", "short", "How far the set is. Taken from the ledger, so that a resumed run goes on "
              "where the last one stopped.",
              [Query(f"sum by (state) (tether_extract_tokens{{{E}}})", "{{state}}")], stacked=True),
        Chart("Time left", "s", "Until all pending tokens are done at the mean rate of this run. It should fall by a second "
              "a second.", [Query(f"max(tether_extract_eta_seconds{{{E}}})", "time left")]),
        Chart("Expected end", "dateTimeAsIso", "Now plus the time left. Level while the rate holds.",
              [Query(f"1000 * max(timestamp(tether_extract_eta_seconds{{{E}}}) + tether_extract_eta_seconds{{{E}}})",
                     "end")], minimum=None),
    ],
)

health = Section(
    "Health",
    [
        Chart("Failures", "short", "Rows given up by this process, by kind.",
              [Query(f"sum by (kind) (tether_extract_failures_total{{{E}}})", "{{kind}}")]),
        Chart("Retries", "cps", "Attempts that failed and are followed by another.",
              [rates("tether_extract_retries_total", "reason", E),
               Query(f"sum(tether_extract_retrying{{{E}}})", "samples being tried again")]),
        Chart("Mismatches by reason", "short", "As the proxy's gate found them. Must stay at zero.",
              [Query(f"sum by (reason) (tether_proxy_mismatches_total{{{P}}})", "{{reason}}")],
              thresholds=must_be_zero()),
        Chart("Dumps of this run", "cps", "States that were not finite, dumps fetched through the proxy, dumps that could "
              "not be deleted.",
              [Query(f"sum(rate(tether_extract_not_finite_total{{{E}}}[$__rate_interval]))", "not finite"),
               Query(f"sum(rate(tether_extract_dumps_fetched_total{{{E}}}[$__rate_interval]))", "fetched"),
               Query(f"sum(rate(tether_extract_dumps_left_behind_total{{{E}}}[$__rate_interval]))", "left behind")]),
        Chart("Upstreams up", "short", "0 while the proxy cannot reach an upstream.",
              [Query(f"min by (upstream) (tether_proxy_upstream_up{{{P}}})", "{{upstream}}")], maximum=1),
        Chart("Proxy errors", "percentunit", "Share of requests that failed for a reason other than the client's own.",
              [Query(f"max(tether:proxy_errors:ratio5m{{{P}}})", "errors")], thresholds=[(None, GREEN), (0.05, RED)]),
    ],
)

where = Section(
    "Where the time goes",
    [
        Chart("Concurrency", "short", "Requests in flight and samples being written, each beside its limit. Few in flight: "
              "the client is the brake. All in flight: the server is.",
              [Query(f"sum(tether_extract_requests_in_flight{{{E}}})", "in flight"),
               Query(f"sum(tether_extract_concurrency{{{E}}})", "--concurrency"),
               Query(f"sum(tether_extract_writing{{{E}}})", "writing"),
               Query(f"sum(tether_extract_writers{{{E}}})", "--writers")]),
        Chart("Request time", "s", "From posting a sample to the end of its reply.",
              quantiles("tether_extract_request_seconds", also=f'{E}, result="ok"')),
        Chart("Store time", "s", "To check a dump, write the sample's file and record it.",
              quantiles("tether_extract_store_seconds", also=E)),
        Chart("Queue wait in the server", "s", "From a prompt's arrival to its first step.",
              quantiles("tether_server_queue_seconds", also=S)),
        Chart("Model busy", "percentunit", "Share of time in the forward pass, and of the token budget that steps fill.",
              [Query(f"max(tether:server_forward:ratio1m{{{S}}})", "in the forward pass"),
               Query(f"max(tether:server_batch_fill:ratio1m{{{S}}})", "batch fill")], maximum=1),
        Chart("Gate wait in the proxy", "s", "How long replies waited for their dumps.",
              quantiles("tether_proxy_gate_wait_seconds", also=P)),
    ],
)

disk = Section(
    "Disk",
    [
        Chart("Output disk", "bytes", "Bytes free, and what the pending samples will take.",
              [Query(f"min(tether_extract_output_free_bytes{{{E}}})", "free"),
               Query(f"sum(tether_extract_output_needed_bytes{{{E}}})", "needed")]),
        Chart("Written", "Bps", "Bytes of finished samples a second.",
              [Query(f"sum(rate(tether_extract_bytes_written_total{{{E}}}[$__rate_interval]))", "written")]),
        Chart("Ledger", "short", "Samples recorded, and dumps handed over that are not deleted yet. The second stays near "
              "the number in flight.",
              [Query(f"sum(tether_extract_ledger_samples{{{E}}})", "samples"),
               Query(f"sum(tether_extract_ledger_dumps{{{E}}})", "dumps to delete"),
               Query(f"sum(tether_extract_rows{{{E}}})", "rows of the data set")]),
        Chart("Alerts firing", "short", "Which of Tether's alerts fire, over time.",
              [Query('sum by (alertname) (ALERTS{alertname=~"Tether.*", alertstate="firing"})', "{{alertname}}")],
              width=FULL),
    ],
)

BOARD = Board(
    uid="tether-extraction",
    title="Tether: extraction run",
    description="One extraction from data set to trainer files: how fast, how long still, and what is wrong.",
    instances=[
        ("extract", "Extraction", "tether_extract_build_info"),
        ("proxy", "Proxy", "tether_proxy_build_info"),
        ("server", "Server", "tether_server_build_info"),
    ],
    sections=[now, speed, health, where, disk, process("tether_extract", E)],
    span="now-12h",
)
