// Reads resources as JSON from standard input; prints what is wrong with each, "" if nothing is. Run it where
// `tools/fetch_clients.sh manifests` has installed the packages.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const packages = {
  "cert-manager.io": "cert-manager",
  "gateway.networking.k8s.io": "gateway-api",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};

async function fault({ apiVersion, kind, ...fields }) {
  const group = apiVersion.split("/")[0];
  const file = `node_modules/@kubernetes-models/${packages[group]}/${apiVersion}/${kind}.js`;
  const models = await import(pathToFileURL(file));
  try {
    new models[kind]({ apiVersion, kind, ...fields }).validate();
  } catch (error) {
    return error.message;
  }
  return "";
}

const faults = [];
for (const resource of JSON.parse(readFileSync(0, "utf8"))) {
  faults.push(await fault(resource));
}
console.log(JSON.stringify(faults));
