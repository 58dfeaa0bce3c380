package agent_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/agent"
)

func TestConfigSaysWhatIsWrongInOneLine(t *testing.T) {
	long := "/" + strings.Repeat("a", 107)
	for name, test := range map[string]struct {
		change func(*agent.Config)
		says   string // empty: it is good
	}{
		"defaults with a node":    {func(c *agent.Config) {}, ""},
		"file source, no node":    {func(c *agent.Config) { c.NodeName, c.Source = "", "file:pods.yaml" }, ""},
		"no node":                 {func(c *agent.Config) { c.NodeName = "" }, "--node-name"},
		"unknown source":          {func(c *agent.Config) { c.Source = "consul" }, "kube or file:PATH"},
		"file without path":       {func(c *agent.Config) { c.Source = "file:" }, "needs a path"},
		"long socket path":        {func(c *agent.Config) { c.ADSSocket = long }, "at most 107"},
		"long admin path":         {func(c *agent.Config) { c.AdminSocket = long }, "at most 107"},
		"unknown.sock too long":   {func(c *agent.Config) { c.ADSSocket = "/" + strings.Repeat("a", 98) + "/a.sock" }, "at most 107"},
		"empty socket path":       {func(c *agent.Config) { c.ADSSocket = "" }, "--ads-socket"},
		"one path for both":       {func(c *agent.Config) { c.AdminSocket = c.ADSSocket }, "--admin-socket"},
		"ADS at the unknown name": {func(c *agent.Config) { c.ADSSocket = "/run/fingerpost/unknown.sock" }, "unknown.sock"},
		"admin beside ADS":        {func(c *agent.Config) { c.AdminSocket = "/run/fingerpost/admin.sock" }, ""},
		"egress port 0":           {func(c *agent.Config) { c.EgressPort = 0 }, "1 to 65535"},
		"egress port large":       {func(c *agent.Config) { c.EgressPort = 65536 }, "1 to 65535"},
		"egress port of another":  {func(c *agent.Config) { c.EgressPort = 15002 }, "choose another"},
		"http without port":       {func(c *agent.Config) { c.HTTPAddress = "127.0.0.1" }, "--http-address"},
		"http off":                {func(c *agent.Config) { c.HTTPAddress = "" }, ""},
		"peer port large":         {func(c *agent.Config) { c.PeerAddress = ":99999" }, "--peer-address"},
		"scope":                   {func(c *agent.Config) { c.CollectScope = "world" }, "node or cluster"},
		"locality":                {func(c *agent.Config) { c.Locality = "rack" }, "even or zone or node"},
		"export":                  {func(c *agent.Config) { c.ExportDefault = "some" }, "none or all"},
		"log format":              {func(c *agent.Config) { c.LogFormat = "xml" }, "text or json"},
		"log level":               {func(c *agent.Config) { c.LogLevel = "loud" }, "debug"},
		"tracing":                 {func(c *agent.Config) { c.Tracing = "jaeger:1.2.3.4:5" }, "otlp:HOST:PORT"},
		"tracing, no port":        {func(c *agent.Config) { c.Tracing = "otlp:collector" }, "otlp:HOST:PORT"},
		"tracing, large port":     {func(c *agent.Config) { c.Tracing = "otlp:collector:99999" }, "otlp:HOST:PORT"},
		"tracing, port 0":         {func(c *agent.Config) { c.Tracing = "otlp:collector:0" }, "otlp:HOST:PORT"},
		"tracing, no host":        {func(c *agent.Config) { c.Tracing = "otlp::4317" }, "otlp:HOST:PORT"},
		"tracing, good":           {func(c *agent.Config) { c.Tracing = "otlp:collector:4317" }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			c := agent.Defaults()
			c.NodeName = "n1"
			test.change(&c)
			err := c.Check()
			var usage *agent.UsageError
			switch {
			case test.says == "" && err != nil:
				t.Errorf("refused: %v", err)
			case test.says != "" && !errors.As(err, &usage):
				t.Errorf("got %v, want a usage error", err)
			case test.says != "" && (!strings.Contains(err.Error(), test.says) || strings.Contains(err.Error(), "\n")):
				t.Errorf("got %q, want one line with %q", err, test.says)
			}
		})
	}
}
