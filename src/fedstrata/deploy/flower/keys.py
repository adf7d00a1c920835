"""Certificates and keys of a deployment: the server's, signed by a new authority, and one key pair per site."""

import hashlib
import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY, CERTIFICATE, KEY = "authority.crt", "server.crt", "server.key"


def server_keys(folder: Path, hosts: list[str], days: int = 365) -> list[Path]:
    """Create an authority and the server's certificate, which sites verify with it; returns the three files.

    The authority's private key is not kept: it signs this one certificate. A server with a new name needs new files,
    and the sites need the new authority.

    Args:
        folder: where the files are written.
        hosts: the server's names and addresses.
        days: until the certificates expire.
    """
    paths = [folder / name for name in (AUTHORITY, CERTIFICATE, KEY)]
    _not_there(paths)
    authority_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer, subject = _name(f"FedStrata authority of {hosts[0]}"), _name(hosts[0])
    issued = x509.CertificateBuilder().issuer_name(issuer)
    issued = issued.not_valid_before(datetime.now(UTC) - timedelta(days=1))  # for sites whose clocks are behind
    issued = issued.not_valid_after(datetime.now(UTC) + timedelta(days=days))

    def usage(signs: bool) -> x509.KeyUsage:
        return x509.KeyUsage(not signs, False, False, False, False, signs, signs, False, False)

    authority = (
        issued.subject_name(issuer)
        .public_key(authority_key.public_key())
        .serial_number(x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    server = (
        issued.subject_name(subject)
        .public_key(server_key.public_key())
        .serial_number(x509.random_serial_number())
        .add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    pem = serialization.Encoding.PEM
    _write(paths[0], authority.public_bytes(pem), 0o644)
    _write(paths[1], server.public_bytes(pem), 0o644)
    form = serialization.PrivateFormat.PKCS8
    _write(paths[2], server_key.private_bytes(pem, form, serialization.NoEncryption()), 0o600)
    return paths


def site_keys(folder: Path, site: str) -> tuple[Path, Path]:
    """Create a site's private key, which stays there, and its public key, which is registered with the server.

    Args:
        folder: where the files are written.
        site: its name.
    """
    private, public = folder / f"{site}.key", folder / f"{site}.pub"
    _not_there([private, public])
    key = ec.generate_private_key(ec.SECP384R1())
    pem, ssh = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    _write(private, key.private_bytes(pem, ssh, serialization.NoEncryption()), 0o600)
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(public, line + b" " + site.encode() + b"\n", 0o644)
    return private, public


def key_fingerprint(private: Path) -> str:
    """The SHA-256 hash of the public key of a site, in hexadecimal digits: sites are counted by it.

    Args:
        private: the file of the private key.
    """
    key = serialization.load_ssh_private_key(private.read_bytes(), None)
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return hashlib.sha256(line).hexdigest()


def days_left(certificate: Path) -> float:
    """Days until a certificate expires; negative if it has expired."""
    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    return (found.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)


def _not_there(paths: list[Path]) -> None:
    if there := [str(p) for p in paths if p.exists()]:
        raise FileExistsError(f"{', '.join(there)} exist; keys are never overwritten: move them away first")


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _write(path: Path, data: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
