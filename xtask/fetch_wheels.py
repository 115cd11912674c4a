"""Fetches wheels into a folder, and goes on where an earlier try broke off, be it the connection or this program.

usage: fetch_wheels.py FOLDER NAME==VERSION ...

pip itself says where the wheels are and fetches the bytes, so its configuration (index, credentials, certificates, proxies)
holds. What is not whole yet is called `.part`; a wheel gets its name once its hash is the index's. Prints the path of
each. Run with the Python that the wheels are for, and with any pip since 22. Exit code 3: this pip is built otherwise.
"""

import hashlib
import os
import sys
import time
import zipfile
from pathlib import Path

OTHER_PIP = 3
BLOCK = 1 << 20
# Tries that bring nothing before it is given up. One that brings something starts the count anew.
TRIES = 5


class Failed(Exception):
    pass


def open_pip():
    """pip's finder of packages and its HTTP session."""
    from pip._internal.commands import create_command

    command = create_command("download")
    options, _ = command.parse_args(["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"])
    # As pip's own start does it: keyrings and certificates read these.
    options.require_venv = False
    context = command.main_context()
    context.__enter__()
    session = command.get_default_session(options)
    return command._build_package_finder(options=options, session=session), session


def find(finder, requirement: str):
    """The link to the best wheel for this Python and machine."""
    from pip._vendor.packaging.requirements import Requirement

    wanted = Requirement(requirement)
    best = finder.find_best_candidate(wanted.name, specifier=wanted.specifier).best_candidate
    if best is None:
        raise Failed(f"pip finds no wheel of {requirement} for this Python and machine")
    return best.link


def receive(session, url: str, part: Path) -> bool:
    """Appends to `part` what it lacks. Whether it is whole as far as the server says."""
    have = part.stat().st_size if part.exists() else 0
    # The bytes as they are: positions are of the file, not of a compressed form.
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
    with session.get(url, headers=headers, stream=True) as reply:
        if reply.status_code == 416:
            # Nothing after what is there: it is whole, or it is not this file. The hash will tell.
            return True
        reply.raise_for_status()
        total = int(reply.headers["content-length"]) if "content-length" in reply.headers else None
        if reply.status_code == 206:
            first = reply.headers.get("content-range", "").removeprefix("bytes ").split("-")[0]
            if first != str(have):
                part.unlink()
                raise OSError(f"asked for bytes from {have}, got them from {first or 'nowhere'}")
            total = have + total if total is not None else None
        else:
            have = 0
        with part.open("ab" if have else "wb") as file:
            for block in reply.raw.stream(BLOCK, decode_content=False):
                file.write(block)
                have += len(block)
                if sys.stderr.isatty():
                    of = f" of {total / 1e6:.0f}" if total is not None else ""
                    print(f"\r{have / 1e6:.0f}{of} MB ", end="", file=sys.stderr, flush=True)
            if sys.stderr.isatty():
                print(file=sys.stderr)
        size = part.stat().st_size
        if total is not None and size < total:
            raise OSError(f"the connection ended after {size} of {total} bytes")
        return True


def is_good(path: Path, link) -> bool:
    """By the hash that the index states, or else by the checksums inside."""
    if not link.hash:
        try:
            with zipfile.ZipFile(path) as wheel:
                return wheel.testzip() is None
        except (zipfile.BadZipFile, OSError):
            return False
    digest = hashlib.new(link.hash_name)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest() == link.hash


def fetch(session, link, folder: Path) -> Path:
    path = folder / link.filename
    part = folder / (link.filename + ".part")
    if path.exists() and is_good(path, link):
        return path
    url, tries, restarted = link.url_without_fragment, 0, False
    while True:
        before = part.stat().st_size if part.exists() else 0
        if before:
            print(f"{link.filename}: going on after {before / 1e6:.0f} MB", file=sys.stderr)
        try:
            receive(session, url, part)
        except Exception as error:  # pip has its own kinds for what the network does
            after = part.stat().st_size if part.exists() else 0
            tries = 0 if after > before else tries + 1
            if tries == TRIES:
                raise Failed(f"{link.filename}: {error} (tried {TRIES} times in vain)") from error
            print(f"{link.filename}: {error}; trying again", file=sys.stderr)
            time.sleep(min(2 * tries, 10))
            continue
        if is_good(part, link):
            os.replace(part, path)
            return path
        part.unlink()
        if restarted:
            raise Failed(f"{link.filename}: its {link.hash_name or 'checksums'} is not what the index states, twice")
        print(f"{link.filename}: what was fetched is not what the index states; fetching anew", file=sys.stderr)
        restarted = True


def main() -> int:
    folder, requirements = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        try:
            finder, session = open_pip()
            links = [find(finder, requirement) for requirement in requirements]
        except (ImportError, AttributeError, TypeError) as error:
            print(f"this pip cannot be asked where the wheels are: {error!r}", file=sys.stderr)
            return OTHER_PIP
        for link in links:
            print(fetch(session, link, folder), flush=True)
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
