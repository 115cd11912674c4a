"""Debian's Chromium, driven over the pipe of its DevTools protocol."""

import base64
import itertools
import json
import os
import select
import subprocess
import time
from pathlib import Path

from watched import DEADLINE, eventually, program


class Browser:
    """One page in a headless browser. What the page complains of is in `complaints`."""

    def __init__(self, folder: Path):
        ours, theirs = os.pipe(), os.pipe()
        # Chromium reads from descriptor 3 and writes to 4.
        command = f'exec "$0" "$@" 3<&{ours[0]} 4>&{theirs[1]}'
        self.child = subprocess.Popen(
            ["bash", "-c", command, program("chromium"), "--headless=new", "--remote-debugging-pipe", "--no-sandbox",
             "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
             "--force-color-profile=srgb", f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(ours[0], theirs[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(ours[0])
        os.close(theirs[1])
        self.out, self.into, self.buffer = ours[1], theirs[0], b""
        self.numbers, self.session = itertools.count(1), None
        self.complaints: list[str] = []
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self.out)
        os.close(self.into)

    def call(self, method: str, **parameters) -> dict:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.write(message)
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            answer = self.read(end)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
        raise AssertionError(f"{method}: no answer")

    def write(self, message: dict) -> None:
        rest = json.dumps(message).encode() + b"\0"
        while rest:
            rest = rest[os.write(self.out, rest):]

    def read(self, end: float) -> dict:
        while b"\0" not in self.buffer:
            assert select.select([self.into], [], [], max(0, end - time.monotonic()))[0], "the browser is silent"
            part = os.read(self.into, 1 << 20)
            assert part, "the browser has ended"
            self.buffer += part
        text, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(text)
        self.hear(message.get("method"), message.get("params", {}))
        return message

    def hear(self, method: str | None, event: dict) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {event['exceptionDetails']}")
        if method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.complaints.append(f"console: {event['args']}")
        if method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"log: {event['entry']}")
        if method == "Network.requestWillBeSent":
            self.requested.append(event["request"]["url"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        eventually("the page is loaded", lambda: self.run("document.readyState") == "complete")

    def run(self, script: str):
        """The value of an expression, awaited if it is a promise."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def screen(self, width: int, height: int, scheme: str, mobile: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str, code: int) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                      **(text if kind == "keyDown" else {}))

    def picture(self, path: Path) -> None:
        height = self.run("Math.ceil(document.documentElement.scrollHeight)")
        width = self.run("document.documentElement.clientWidth")
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                         clip={"x": 0, "y": 0, "width": width, "height": height, "scale": 1})["data"]
        path.write_bytes(base64.b64decode(data))
