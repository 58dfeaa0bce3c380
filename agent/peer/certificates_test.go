package peer

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// authority signs certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  crypto.Signer
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "peers"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(240 * time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{t, cert, key}
}

// certificate makes one for the names, which change may change.
func (a *authority) certificate(key crypto.Signer, change func(*x509.Certificate), uris ...string) []byte {
	a.t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "agent"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, s := range uris {
		u, err := url.Parse(s)
		if err != nil {
			a.t.Fatal(err)
		}
		template.URIs = append(template.URIs, u)
	}
	if change != nil {
		change(template)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	return der
}

func edKey(t *testing.T) ed25519.PrivateKey {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// write puts the files of a node into the directory.
func (a *authority) write(dir string, key crypto.Signer, der []byte) {
	a.t.Helper()
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	for name, block := range map[string]*pem.Block{
		certificateFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "PRIVATE KEY", Bytes: raw}, authorityFile: {Type: "CERTIFICATE", Bytes: a.cert.Raw},
	} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
}

func TestCertificateSpeaksForTheNodeThatItNames(t *testing.T) {
	ca, other := newAuthority(t), newAuthority(t)
	dir, own := t.TempDir(), edKey(t)
	ca.write(dir, own, ca.certificate(own, nil, "fingerpost://node/n1"))
	c, err := LoadCertificates(dir, "n1")
	if err != nil {
		t.Fatal(err)
	}
	if !c.Identity().Attach || c.Identity().Fingerprint() != FingerprintOf(own.Public().(ed25519.PublicKey)) {
		t.Error("the identity is not that of the files")
	}
	key := edKey(t)
	print := FingerprintOf(key.Public().(ed25519.PublicKey))
	ec, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		der  []byte
		key  Fingerprint
		node string // empty: refused
	}{
		"good":            {ca.certificate(key, nil, "fingerpost://node/n2"), print, "n2"},
		"other names too": {ca.certificate(key, func(c *x509.Certificate) { c.DNSNames = []string{"n9"} }, "spiffe://x/y", "fingerpost://node/n2"), print, "n2"},
		"no name":         {ca.certificate(key, func(c *x509.Certificate) { c.DNSNames = []string{"n2"}; c.Subject.CommonName = "n2" }), print, ""},
		"two nodes":       {ca.certificate(key, nil, "fingerpost://node/n2", "fingerpost://node/n1"), print, ""},
		"another host":    {ca.certificate(key, nil, "fingerpost://pod/n2"), print, ""},
		"empty node":      {ca.certificate(key, nil, "fingerpost://node/"), print, ""},
		"another scheme":  {ca.certificate(key, nil, "https://node/n2"), print, ""},
		"another's":       {other.certificate(key, nil, "fingerpost://node/n2"), print, ""},
		"another key":     {ca.certificate(key, nil, "fingerpost://node/n2"), c.Identity().Fingerprint(), ""},
		"no Ed25519":      {ca.certificate(ec, nil, "fingerpost://node/n2"), print, ""},
		"expired":         {ca.certificate(key, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }, "fingerpost://node/n2"), print, ""},
		"a server's only": {ca.certificate(key, func(c *x509.Certificate) { c.ExtKeyUsage = c.ExtKeyUsage[:1] }, "fingerpost://node/n2"), print, ""},
		"an authority's":  {ca.certificate(key, func(c *x509.Certificate) { c.IsCA, c.BasicConstraintsValid = true, true }, "fingerpost://node/n2"), print, ""},
		"none":            {nil, print, ""},
		"junk":            {[]byte("junk"), print, ""},
	} {
		for range 2 { // the second answer is remembered
			if node, ok := c.Trust(test.key, test.der); node != test.node || ok != (test.node != "") {
				t.Errorf("%s: speaks for %q %v, want %q", name, node, ok, test.node)
			}
		}
	}
}

func TestCertificatesThatNobodyWouldBelieveAreNotUsed(t *testing.T) {
	ca, other := newAuthority(t), newAuthority(t)
	key := edKey(t)
	for name, test := range map[string]struct {
		spoil func(dir string)
		says  string
	}{
		"another node": {func(dir string) { ca.write(dir, key, ca.certificate(key, nil, "fingerpost://node/n2")) }, `for node "n2"`},
		"another's":    {func(dir string) { ca.write(dir, key, other.certificate(key, nil, "fingerpost://node/n1")) }, "other agents would refuse it"},
		"no name":      {func(dir string) { ca.write(dir, key, ca.certificate(key, nil)) }, "fingerpost://node/NODE"},
		"another key":  {func(dir string) { ca.write(dir, edKey(t), ca.certificate(key, nil, "fingerpost://node/n1")) }, "tls.key"},
		"no authority": {func(dir string) { _ = os.WriteFile(filepath.Join(dir, authorityFile), []byte("x"), 0o600) }, "ca.crt"},
		"a file less":  {func(dir string) { _ = os.Remove(filepath.Join(dir, keyFile)) }, "tls.key"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			ca.write(dir, key, ca.certificate(key, nil, "fingerpost://node/n1"))
			test.spoil(dir)
			if _, err := LoadCertificates(dir, "n1"); err == nil || !strings.Contains(err.Error(), test.says) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%v, want one line with %q", err, test.says)
			}
		})
	}
}

func TestCertificatesThatChangeAreUsedAndBrokenOnesAreNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := newAuthority(t)
		dir, first, second, peer := t.TempDir(), edKey(t), edKey(t), edKey(t)
		of := func(key ed25519.PrivateKey) Fingerprint { return FingerprintOf(key.Public().(ed25519.PublicKey)) }
		ca.write(dir, first, ca.certificate(first, nil, "fingerpost://node/n1"))
		c, err := LoadCertificates(dir, "n1")
		if err != nil {
			t.Fatal(err)
		}
		go c.Watch(t.Context(), nil)
		old := ca.certificate(peer, nil, "fingerpost://node/n2")
		if _, ok := c.Trust(of(peer), old); !ok {
			t.Fatal("not trusted")
		}

		if err := os.WriteFile(filepath.Join(dir, keyFile), []byte("half a write"), 0o600); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * certificatesEvery)
		if c.Err() == nil || c.Identity().Fingerprint() != of(first) {
			t.Errorf("with a broken key: %v, key of the first %v", c.Err(), c.Identity().Fingerprint() == of(first))
		}

		// A new authority: whom the old one has signed is believed no more.
		next := newAuthority(t)
		next.write(dir, second, next.certificate(second, nil, "fingerpost://node/n1"))
		time.Sleep(2 * certificatesEvery)
		if c.Err() != nil || c.Identity().Fingerprint() != of(second) {
			t.Errorf("with good files: %v, key of the second %v", c.Err(), c.Identity().Fingerprint() == of(second))
		}
		if node, ok := c.Trust(of(peer), old); ok {
			t.Errorf("the old authority is believed for %s", node)
		}
		if _, ok := c.Trust(of(peer), next.certificate(peer, nil, "fingerpost://node/n2")); !ok {
			t.Error("the new authority is not believed")
		}
	})
}
