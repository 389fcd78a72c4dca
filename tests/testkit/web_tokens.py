"""An issuer of JSON Web Tokens, as an identity provider is one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from joserfc import jwt
from joserfc.jwk import ECKey, KeySet


class TokenIssuer:
    """Signs tokens.

    Args:
        issuer: The claim ``iss`` of its tokens.
        audience: Their claim ``aud``.
    """

    def __init__(self, issuer: str = "https://login.example.com", audience: str = "understudy") -> None:
        self.issuer, self.audience = issuer, audience
        self.key = ECKey.generate_key("P-256", {"kid": "first"})

    def renew(self) -> None:
        """Sign with a new key from now on."""
        self.key = ECKey.generate_key("P-256", {"kid": "second"})

    def jwks(self) -> bytes:
        """Return the public key."""
        return json.dumps(KeySet([self.key]).as_dict()).encode()

    def publish(self, file: Path) -> None:
        """Write the public key."""
        file.write_bytes(self.jwks())

    def token(self, subject: str = "ada", *groups: str, **claims: Any) -> str:
        """Return a token that is valid for five minutes; a claim of None is left out."""
        now = int(time.time())
        all_claims = {"iss": self.issuer, "aud": self.audience, "sub": subject, "exp": now + 300, "groups": [*groups]}
        present = {name: value for name, value in {**all_claims, **claims}.items() if value is not None}
        signed: str = jwt.encode({"alg": "ES256", "kid": self.key.kid}, present, self.key)
        return signed
