// Command node is the kubelet and kube-proxy in one binary, chosen by the name it is called by.
//
// Only a node that runs pods needs them: apart from command kube, nothing else waits for their packages.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func command(name string) *cobra.Command {
	switch name {
	case "kubelet":
		switch command := any(kubelet.NewKubeletCommand).(type) {
		case func(context.Context) *cobra.Command:
			return command(context.Background())
		case func() *cobra.Command: // until 1.33
			return command()
		}
	case "kube-proxy":
		return proxy.NewProxyCommand()
	}
	return nil
}

func main() {
	name := filepath.Base(os.Args[0])
	cmd := command(name)
	if cmd == nil {
		fmt.Fprintf(os.Stderr, "%s: call me by the name of a component (kubelet, kube-proxy), through a symlink\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(cmd))
}
