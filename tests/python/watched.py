"""A whole stack that is watched: the three release binaries, and Prometheus scraping them."""

import contextlib
import http.client
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml
from places import ROOT, binary
from tokenizers import Tokenizer, models, pre_tokenizers

MODEL = ROOT / ".tether" / "golden" / "tiny-v3"
GRAFANA = ROOT / "grafana"
VOCABULARY = 512
DEADLINE = 120
# Short, so that a test has many scrapes.
SCRAPE = 0.25


def eventually(what: str, probe):
    """What `probe` gives, once it gives something."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        value = probe()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what}: still not so after {DEADLINE} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(address: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as reply:
        return reply.read().decode()


def answers(address: str, path: str) -> bool:
    try:
        get(address, path)
    except OSError:
        return False
    return True


class Process:
    """One program, killed at the end, with its words in a file."""

    def __init__(self, folder: Path, name: str, *arguments):
        self.log = folder / f"{name}.log"
        self.name = name
        self.arguments = [str(argument) for argument in arguments]
        self.begin()

    def begin(self) -> None:
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(self.arguments, stdout=log, stderr=subprocess.STDOUT)

    def up(self, address: str, path: str) -> None:
        def probe():
            assert self.child.poll() is None, f"{self.name} ended:\n{self.log.read_text()}"
            return answers(address, path)
        eventually(f"{self.name} answers", probe)

    def end(self) -> None:
        self.child.kill()
        self.child.wait()


def model(folder: Path) -> Path:
    """The tiny model with a tokenizer, which the golden one lacks: one word for each token ID."""
    shutil.copytree(MODEL, folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class Liar(BaseHTTPRequestHandler):
    """A server that answers 200 and publishes nothing, which the proxy's gate must notice."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.dumps({"text": "", "meta_info": {"prompt_tokens": 3}}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *_):
        pass


@dataclass
class Stack:
    """Addresses, and how to end it all."""

    folder: Path
    processes: list[Process] = field(default_factory=list)
    server: str = ""
    proxy: str = ""
    proxy_metrics: str = ""
    # A proxy before a server that publishes nothing.
    doubter: str = ""
    extract_metrics: str = ""
    prometheus: str = ""
    down: str = ""
    liar: ThreadingHTTPServer | None = None

    def start(self, *arguments, name: str, address: str, path: str) -> Process:
        process = Process(self.folder, name, *arguments)
        self.processes.append(process)
        process.up(address, path)
        return process

    def start_server(self) -> None:
        self.dumps = self.folder / "dumps"
        self.dumps.mkdir()
        self.server = f"127.0.0.1:{free_port()}"
        self.start(binary("tether-server"), "--model", model(self.folder / "model"), "--listen", self.server,
                   "--dump-dir", self.dumps, "--threads", "1", name="server", address=self.server, path="/health")

    def start_proxy(self, *flags) -> None:
        self.proxy, self.proxy_metrics = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        # The second upstream refuses connections all the time.
        self.down = f"http://127.0.0.1:{free_port()}"
        self.start(binary("tether-proxy"), "--listen", self.proxy, "--metrics-addr", self.proxy_metrics,
                   "--upstream", f"http://{self.server}", "--upstream", self.down, "--dump-dir", self.dumps, *flags,
                   name="proxy", address=self.proxy, path="/tether/live")

    def start_doubter(self) -> None:
        self.liar = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
        threading.Thread(target=self.liar.serve_forever, daemon=True).start()
        self.doubter = f"127.0.0.1:{free_port()}"
        self.start(binary("tether-proxy"), "--listen", self.doubter, "--dump-wait", "50ms",
                   "--upstream", "http://127.0.0.1:%d" % self.liar.server_address[1], "--dump-dir", self.dumps,
                   name="doubter", address=self.doubter, path="/tether/live")

    def start_extraction(self, samples: int, *flags) -> Process:
        """A run that does not end before it is told to."""
        data = self.folder / "data.jsonl"
        with data.open("w") as file:
            for row in range(samples):
                ids = [(row * 7 + at * 3) % (VOCABULARY - 2) + 1 for at in range(32 + row % 64)]
                print(json.dumps({"input_ids": ids}), file=file)
            print("{}", file=file)  # one row that is no sample
        self.out = self.folder / "states"
        self.textfile = self.folder / "run.prom"
        self.extract_metrics = f"127.0.0.1:{free_port()}"
        return self.start(binary("tether-extract"), "run", "--proxy", f"http://{self.proxy}", "--data", data,
                          "--out", self.out, "--format", "specforge", "--concurrency", "2", "--points", "2,4,5",
                          "--metrics-addr", self.extract_metrics, "--metrics-textfile", self.textfile, *flags,
                          name="extract", address=self.extract_metrics, path="/metrics")

    def start_prometheus(self) -> None:
        """With our own rules, and our own jobs at other addresses and a shorter interval."""
        config = yaml.safe_load((GRAFANA / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": f"{int(SCRAPE * 1000)}ms", "scrape_timeout": f"{int(SCRAPE * 1000)}ms",
                            "evaluation_interval": "500ms"}
        config["rule_files"] = [str(GRAFANA / "prometheus" / path) for path in config["rule_files"]]
        targets = {"tether-server": [self.server], "tether-proxy": [self.proxy_metrics, self.doubter],
                   "tether-extract": [self.extract_metrics]}
        for job in config["scrape_configs"]:
            del job["file_sd_configs"]
            job["static_configs"] = [{"targets": [t for t in targets[job["job_name"]] if t]}]
        path = self.folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        self.prometheus = f"127.0.0.1:{free_port()}"
        self.start(program("prometheus"), f"--config.file={path}", f"--storage.tsdb.path={self.folder / 'tsdb'}",
                   f"--web.listen-address={self.prometheus}", name="prometheus", address=self.prometheus, path="/-/ready")

    def end(self) -> None:
        for process in reversed(self.processes):
            process.end()
        if self.liar:
            self.liar.shutdown()
            self.liar.server_close()

    def api(self, path: str, **parameters):
        """Data of a call of Prometheus' API."""
        url = f"http://{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters, doseq=True)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def value(self, query: str, at: float | None = None) -> float:
        """The only value of `query`."""
        result = self.api("query", query=query, **({"time": at} if at else {}))["result"]
        assert len(result) == 1, f"{query}: {result}"
        return float(result[0]["value"][1])


def program(name: str) -> str:
    """A system package's program. A test without it has not passed."""
    found = shutil.which(name)
    assert found, f"`{name}` is not installed; on Debian and Ubuntu: apt-get install {PACKAGES[name]}"
    return found


PACKAGES = {"prometheus": "prometheus", "promtool": "prometheus", "chromium": "chromium"}


def samples(text: str) -> dict[tuple[str, frozenset], float]:
    """Prometheus text as (name, labels) to value."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            head, value = line.rsplit(" ", 1)
            name, _, labels = head.partition("{")
            found[name, frozenset(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels))] = float(value)
    return found


@dataclass
class Load:
    """A load on a proxy that counts what it did and how it was answered."""

    proxy: str
    # Empty for none.
    doubter: str
    statuses: dict[int, int] = field(default_factory=dict)
    # Of the doubter, where every reply is a mismatch.
    doubted: int = 0
    prompts: int = 0
    tokens: int = 0
    # When each refusal came: nobody else on this proxy is refused.
    refused: list[float] = field(default_factory=list)
    stopping: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    threads: list[threading.Thread] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)

    def start(self, threads: int = 2, pause: float = 0.02) -> None:
        for number in range(threads):
            thread = threading.Thread(target=self.run, args=(number, pause))
            thread.start()
            self.threads.append(thread)

    def stop(self) -> None:
        self.stopping = True
        for thread in self.threads:
            thread.join()
        assert not self.failures, self.failures

    def run(self, number: int, pause: float) -> None:
        try:
            with contextlib.closing(http.client.HTTPConnection(self.proxy, timeout=DEADLINE)) as connection:
                with contextlib.closing(http.client.HTTPConnection(self.doubter, timeout=DEADLINE)) as doubter:
                    turn = 0
                    while not self.stopping:
                        self.one(connection, doubter, turn)
                        turn += 1
                        time.sleep(pause)
        except BaseException as error:  # told where the load is stopped
            self.failures.append(error)

    def one(self, connection, doubter, turn: int) -> None:
        ids = [[1, 5, 9, turn % 500], [[3, 4], [5, 6, 7]]][turn % 5 == 1]
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": turn % 2}}
        prompts, tokens = (len(ids), sum(map(len, ids))) if turn % 5 == 1 else (1, len(ids))
        if turn % 5 == 2:
            body = {"text": "w1 w2 w3", "sampling_params": {"max_new_tokens": 0}}
            tokens = 0  # the proxy does not know how many a text has
        if turn % 5 == 3:
            status = self.post(connection, '{"rid": "a", "rid": "b"}')
            prompts = tokens = 0
        else:
            status = self.post(connection, json.dumps(body))
        with self.lock:
            self.statuses[status] = self.statuses.get(status, 0) + 1
            if status == 400:
                self.refused.append(time.time())
            self.prompts += prompts
            self.tokens += tokens
        if self.doubter and turn % 10 == 4:
            assert self.post(doubter, '{"input_ids": [1, 2, 3]}') == 502
            with self.lock:
                self.doubted += 1

    @staticmethod
    def post(connection, body: str) -> int:
        connection.request("POST", "/generate", body, {"content-type": "application/json"})
        reply = connection.getresponse()
        reply.read()
        return reply.status


def hang_up(stack: Stack, times: int) -> None:
    """Clients that leave with half of their body sent."""
    host, port = stack.proxy.split(":")
    gone = ("tether_proxy_client_gone_total", frozenset({("phase", "reading")}))
    received = ("tether_proxy_requests_received_total", frozenset({("route", "generate")}))
    body = json.dumps({"input_ids": [7] * 200})
    for number in range(times):
        before = samples(get(stack.proxy_metrics))
        with socket.create_connection((host, int(port))) as client:
            head = f"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(f"{head}{body[:200]}".encode())
            eventually("the head was read", lambda: samples(get(stack.proxy_metrics))[received] > before[received])
        eventually("the proxy has noticed", lambda: samples(get(stack.proxy_metrics))[gone] == number + 1)
