package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

// Config says how to reach the API server: by the kubeconfig file if one is
// given, else as a pod of the cluster, else as kubectl would (KUBECONFIG, then
// ~/.kube/config). The error is one line that says what to do.
func Config(kubeconfig string) (*rest.Config, error) {
	if kubeconfig != "" {
		config, err := load(&clientcmd.ClientConfigLoadingRules{ExplicitPath: kubeconfig})
		if err != nil {
			return nil, fmt.Errorf("kubeconfig %q: %s", kubeconfig, oneLine(err))
		}
		return config, nil
	}
	config, err := rest.InClusterConfig()
	if err == nil {
		return config, nil
	}
	if !errors.Is(err, rest.ErrNotInCluster) {
		return nil, fmt.Errorf("API server of this pod: %s", oneLine(err))
	}
	config, err = load(clientcmd.NewDefaultClientConfigLoadingRules())
	if err != nil {
		return nil, fmt.Errorf("no API server: run in a pod, or give --kubeconfig or KUBECONFIG: %s", oneLine(err))
	}
	return config, nil
}

func load(rules clientcmd.ClientConfigLoader) (*rest.Config, error) {
	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
}

// BridgeKlog makes what client-go logs on its own go to log: its errors as
// warnings, its messages for debugging only. Call it once, before anything of
// this package runs; it is not safe for concurrent use.
func BridgeKlog(log *slog.Logger) {
	klog.SetSlogLogger(slog.New(klogHandler{log.Handler(), slog.LevelWarn}))
}

// klogHandler lowers the level of client-go's messages.
type klogHandler struct {
	slog.Handler
	errors slog.Level // of its errors
}

func (h klogHandler) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo && h.Handler.Enabled(ctx, h.lowered(level))
}

func (h klogHandler) Handle(ctx context.Context, r slog.Record) error {
	r.Level = h.lowered(r.Level)
	if !h.Handler.Enabled(ctx, r.Level) {
		return nil // not everybody asks Enabled first
	}
	return h.Handler.Handle(ctx, r)
}

func (h klogHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return klogHandler{h.Handler.WithAttrs(attrs), h.errors}
}

func (h klogHandler) WithGroup(name string) slog.Handler {
	return klogHandler{h.Handler.WithGroup(name), h.errors}
}

func (h klogHandler) lowered(level slog.Level) slog.Level {
	if level > slog.LevelInfo {
		return h.errors
	}
	return slog.LevelDebug
}
